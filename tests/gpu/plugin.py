# SPDX-License-Identifier: MIT
"""GPUs run the programs that tests emulate: `torchrun --nproc-per-node 4 -m pytest -p tests.gpu.plugin tests/emulator`.

Every rank of the job runs the same tests. After an emulation that ends well, on as many devices as the job has ranks,
each rank runs the compiled program on its own GPU, twice, from the same arguments and with delays that differ between
ranks; their arguments must then equal those of the emulation. One line at the end counts the programs that ran, and
those that did not by reason. Tests of programs with varying results are marked `varies`.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

import tilescale
from tests.again import NO_LAYOUT, Again, copied
from tilescale.errors import LaunchError
from tilescale.program.model import Program
from tilescale.runtime.outputs import output_positions

_SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("TILESCALE_")}
"""Read before tests/conftest.py takes them away: here they say how the job uses the GPUs."""

ERROR = {torch.float64: 1e-6, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest difference, as a share of the largest value of a tensor; GEMMs of float32 use TF32."""
EIGHT_BITS = 0.13


def _run(program: Program, given: list[list[Any]], wanted: list[list[Any]]) -> str | None:
    """Run a program and compare; returns why it was not run."""
    if _again.test.get_closest_marker("varies"):
        return "what it leaves depends on the time"
    world, kernel = tilescale.init(), tilescale.compile(program.func, schedule="sequential")
    for _ in range(2):
        mine = [copied(a, world.device) for a in given[world.rank]]
        time.sleep(random.random() * 0.01)
        said = _call(kernel, mine) or next(_differences(program, mine, wanted[world.rank]), None)
        said = next((s for s in world.all_gather(said) if s), None)
        if said is not None and (NO_LAYOUT in said or said.startswith(LaunchError.__name__)):
            return said
        if said is not None:
            print(f"on GPUs: {said}")
            raise AssertionError(f"on GPUs: {said}")
    return None


def _call(kernel: Any, values: list[Any]) -> str | None:
    """Call a kernel; returns what went wrong. What it allocates itself takes the place of what the test passed."""
    outputs = output_positions(kernel.program, None)
    try:
        made = kernel(*[value for i, value in enumerate(values) if i not in outputs])
        torch.cuda.synchronize()
    except Exception as error:  # reported by all ranks
        return f"{type(error).__name__}: {error}"
    for position, value in zip(outputs, [made] if len(outputs) == 1 else made or [], strict=True):
        values[position] = value
    return None


def _differences(program: Program, found: list[Any], wanted: list[Any]) -> Iterator[str]:
    """Differences of this rank's results from those of the emulation."""
    for parameter, a, b in zip(program.parameters, found, wanted, strict=True):
        if not isinstance(b, torch.Tensor) or not b.numel():
            continue
        most = 0.0
        if b.is_floating_point():
            most = ERROR.get(b.dtype, EIGHT_BITS) * float(b.double().nan_to_num(0, 0, 0).abs().max())
        a, b = (x.double() if x.is_floating_point() else x.to(torch.int64) for x in (a.cpu(), b))
        try:
            torch.testing.assert_close(a, b, rtol=0, atol=most, equal_nan=True)
        except AssertionError as error:
            yield f"{parameter.name}: {error}"


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)


_again = Again(_run, tilescale.init().size, _architecture(), times=2)


def pytest_configure(config: pytest.Config) -> None:
    """Install the replay on GPUs. All ranks draw the same examples."""
    os.environ |= _SETTINGS
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    tilescale.emulate = _again.emulate
    hypothesis.settings.register_profile("gpu", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("gpu")
    if world.rank:
        config.option.verbose = -2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of such a run are GPU tests."""
    for item in items:
        item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test begins, with the same random numbers on all ranks: each has its own device's share of one emulation."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))
    _again.begin(item)


def pytest_sessionfinish() -> None:
    ran = _again.reasons.pop("", 0)
    if ran and tilescale.init().rank == 0:
        others = ", ".join(f"{n} {reason.splitlines()[0]}" for reason, n in sorted(_again.reasons.items()))
        print(f"\n{ran} emulations repeated on GPUs; not: {others}")
