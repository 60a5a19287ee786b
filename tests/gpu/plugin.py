# SPDX-License-Identifier: MIT
"""Run the emulator's tests on GPUs: `torchrun --nproc-per-node 4 -m pytest -p tests.gpu.plugin tests/emulator`.

Every rank of the job runs the same tests. Where a test emulates a launch on as many devices as the job has ranks, each
rank runs the compiled kernel on its own GPU instead, twice with delays that differ between ranks; the results gather on
all ranks, and the test's own comparison decides. Launches on another number of devices, and programs that have no
CUDA lowering, are skipped with that reason.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

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


class _OnGpu:
    """Stands for the emulator's report, which a GPU does not make."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"the results are right; report.{name} is the emulator's")


def _run(
    func: Any,
    args: Sequence[Any] | None = None,
    *,
    machine: Any = None,
    data: bool = True,
    schedule_seed: int | None = None,
    **_options: Any,
) -> Any:
    world = tilescale.init()
    if machine is not None:
        pytest.skip("the launch is for another machine")
    if not data or args is None:
        pytest.skip("the launch is for its time only")
    if schedule_seed is not None:
        pytest.skip("the order of blocks is the emulator's")
    per_unit = [list(a) for a in args] if all(isinstance(a, list | tuple) for a in args) else [list(args)]
    if len(per_unit) != world.size:
        pytest.skip(f"the launch is on {len(per_unit)} devices, the job has {world.size}")
    kernel = tilescale.compile(func)
    reason = reason_against(structure(func, kernel.machine))
    if reason is not None:
        pytest.skip(f"no CUDA lowering: {reason}")
    for _ in range(2):
        mine = [_there(a, world.device) for a in per_unit[world.rank]]
        time.sleep(random.random() * 0.01)
        try:
            _call(kernel, mine)
        except LaunchError as error:
            pytest.skip(f"the device has no room: {error.message}")
        torch.cuda.synchronize()
    results = world.all_gather([a.cpu() if isinstance(a, torch.Tensor) else a for a in mine])
    for unit, values in zip(per_unit, results, strict=True):
        for tensor, value in zip(unit, values, strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(value)
    return _OnGpu()


def _there(value: Any, device: torch.device) -> Any:
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


def pytest_configure(config: pytest.Config) -> None:
    """Put the GPUs in the emulator's place."""
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    tilescale.emulate = _run
    if world.rank:
        config.option.verbose = -2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of such a run are GPU tests, but for those of what GPUs do not do, and kernels for other ones."""
    major, minor = torch.cuda.get_device_capability()
    here = f"sm_{major}{minor}" + "a" * (major >= 9)
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("emulator_only"):
            item.add_marker(pytest.mark.skip("only the emulator does this"))
        kernel = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
        if isinstance(kernel, PlainKernel) and here not in kernel.targets:
            item.add_marker(pytest.mark.skip(f"{here}: {kernel.why_not.get(here, 'not among its targets')}"))
