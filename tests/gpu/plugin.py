# SPDX-License-Identifier: MIT
"""Whatever tests emulate, GPUs run too: `torchrun --nproc-per-node 4 -m pytest -p tests.gpu.plugin tests/emulator`.

Every rank of the job runs the same tests. After an emulation that ends well, on as many devices as the job has ranks,
each rank runs the compiled program on its own GPU, twice, from the same arguments and with delays that differ between
ranks; what is in them then must be what the emulation left. Programs are left out that were not checked whole: they
may race. One line at the end counts the programs that ran, and those that did not by reason.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import torch

import tilescale
from tests.kernels.base import PlainKernel
from tilescale.backends.cuda.support import reason_against
from tilescale.errors import LaunchError
from tilescale.passes.structure import structure
from tilescale.runtime.outputs import output_positions
from tilescale.settings import settings

settings()  # read now: tests/conftest.py takes the variables away

ERROR = {torch.float64: 1e-6, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest difference, as a share of the largest value of a tensor; products of float32 are those of TF32."""
EIGHT_BITS = 0.13

_emulate = tilescale.emulate
_ran: dict[int, tuple[Any, int]] = {}
_reasons: Counter[str] = Counter()
_test: pytest.Item | None = None


def _emulate_and_run(func: Any, args: Sequence[Any] | None = None, **options: Any) -> Any:
    reason = _reason_against(func, args, options)
    given = None if reason else [[_copy(a) for a in unit] for unit in _per_unit(args)]
    report = _emulate(func, args, **options)
    if given is not None:
        _, times = _ran.get(id(func), (func, 0))
        _ran[id(func)] = func, times + 1  # holds the program, so that no other one gets its number
        reason = _run(func, given, _per_unit(args))
    _reasons[reason or "ran"] += 1
    return report


def _per_unit(args: Sequence[Any]) -> list[list[Any]]:
    return [list(a) for a in args] if all(isinstance(a, list | tuple) for a in args) else [list(args)]


def _reason_against(func: Any, args: Sequence[Any] | None, options: dict[str, Any]) -> str | None:
    """Why a program is only emulated."""
    if options.get("check") not in (None, "all"):
        return "not checked whole"
    kernel = _test.callspec.params.get("kernel") if hasattr(_test, "callspec") else None
    if isinstance(kernel, PlainKernel) and _architecture() not in kernel.targets:
        return f"{_architecture()} is not among the kernel's targets"
    if options.get("machine") is not None:
        return "another machine"
    if args is None or not options.get("data", True):
        return "for its time only"
    if _ran.get(id(func), (func, 0))[1] > 1:
        return "ran before"
    if len(_per_unit(args)) != tilescale.init().size:
        return "another number of devices"
    return None


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)


def _run(func: Any, given: list[list[Any]], wanted: list[list[Any]]) -> str | None:
    """Run a program and compare; returns why it was not run."""
    world = tilescale.init()
    kernel = tilescale.compile(func)
    reason = reason_against(structure(func, kernel.machine))
    if reason is not None:
        return f"no CUDA lowering: {reason}"
    said = None
    for _ in range(2):
        mine = [_copy(a, world.device) for a in given[world.rank]]
        time.sleep(random.random() * 0.01)
        try:
            _call(kernel, mine)
            torch.cuda.synchronize()
        except LaunchError as error:
            said = f"the device has no room: {error.message}"
        except Exception as error:  # told below, by all ranks
            said = f"{type(error).__name__}: {error}"
        if said is None:
            said = next(_differences(func, mine, wanted[world.rank]), None)
        said = next((s for s in world.all_gather(said) if s), None)
        if said is not None:
            break
    if said is not None and not said.startswith("the device has no room"):
        raise AssertionError(f"on GPUs: {said}")
    return said


def _copy(value: Any, device: torch.device | str = "cpu") -> Any:
    """A copy on a device, with the same strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device).copy_(value)


def _call(kernel: Any, values: list[Any]) -> None:
    """Call a kernel; what it allocates and returns itself takes the place of what the test passed for it."""
    outputs = output_positions(kernel.program, None)
    made = kernel(*[value for i, value in enumerate(values) if i not in outputs])
    for position, value in zip(outputs, [made] if len(outputs) == 1 else made or [], strict=True):
        values[position] = value


def _differences(func: Any, found: list[Any], wanted: list[Any]) -> Iterator[str]:
    """How the results of this rank differ from those of the emulation."""
    names = [p.name for p in func.params]
    for name, a, b in zip(names, found, wanted, strict=True):
        if not isinstance(b, torch.Tensor) or not b.numel():
            continue
        a, b = a.cpu(), b.cpu()
        most = 0.0
        if b.is_floating_point():
            most = ERROR.get(b.dtype, EIGHT_BITS) * float(b.double().nan_to_num(0, 0, 0).abs().max())
        a, b = (x.double() if x.is_floating_point() else x.to(torch.int64) for x in (a, b))
        try:
            torch.testing.assert_close(a, b, rtol=0, atol=most, equal_nan=True)
        except AssertionError as error:
            yield f"{name}: {error}"


def pytest_configure(config: pytest.Config) -> None:
    """Put GPUs behind the emulator. All ranks draw the same examples."""
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    tilescale.emulate = _emulate_and_run
    hypothesis.settings.register_profile("gpu", derandomize=True, deadline=None, max_examples=10)
    hypothesis.settings.load_profile("gpu")
    if world.rank:
        config.option.verbose = -2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of such a run are GPU tests."""
    for item in items:
        item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remember which test it is."""
    global _test
    _test = item


def pytest_sessionfinish() -> None:
    """Say what ran."""
    if _reasons and tilescale.init().rank == 0:
        ran = _reasons.pop("ran", 0)
        others = ", ".join(f"{n} {reason}" for reason, n in _reasons.most_common())
        print(f"\n{ran} emulations repeated on GPUs; not: {others}")
