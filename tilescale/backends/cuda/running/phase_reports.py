# SPDX-License-Identifier: MIT
"""Reports of grids that ended because a phase of an mbarrier stayed incomplete (lowering/bounded_phases.py).

Such a grid ends with an error of CUDA, after which the device answers nothing. Its report in the host's memory says
which barrier it was.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from tilelang_core import ir, modules, tl
from tilelang_core.scalars import BarrierWait
from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.streams import past_waits
from tilescale.backends.tilelang.lowering.bounded_phases import NAMES, STATE
from tilescale.errors import Location, WaitTimeoutError
from tilescale.program.effects import statements
from tilescale.program.model import Launch, location

PATIENCE = 3
"""The bound, in multiples of a wait for a flag: before threads arrive, a barrier of devices may take twice that."""


class _Report(ctypes.Structure):
    _fields_ = (
        ("is_complete", ctypes.c_int),
        ("block", ctypes.c_int * 3),
        ("index", ctypes.c_int),
        ("parity", ctypes.c_int),
        ("names", ctypes.c_char * NAMES),
    )


_limit_s = 0.0
_launches: defaultdict[str, list[weakref.ref[Launch]]] = defaultdict(list)
_is_begun = _is_raised = False
"""Whether a module has such waits; whether a failure was raised."""


def bound_phases(wait_s: float) -> None:
    """Bound waits for phases in modules that are loaded from now on; the longest bound of a process counts."""
    global _limit_s
    _limit_s = max(_limit_s, PATIENCE * wait_s)
    modules.on_load(_begin)


def name_kernel(kernel: str, launch: Launch) -> None:
    """Take lines of reports from the launch that a kernel was made of, while the launch exists."""
    known = _launches[kernel]
    known[:] = [one for one in known if one() is not None and one() is not launch] + [weakref.ref(launch)]


def _begin(module: int) -> None:
    """Set the bound of a module's waits, and the address of the report."""
    from cuda.bindings import driver as cuda

    status, state, _ = cuda.cuModuleGetGlobal(cuda.CUmodule(module), STATE)
    if status:
        return  # it has no such waits
    global _is_begun
    _is_begun = True
    words = torch.tensor([int(_limit_s * 1e9), _page().data_ptr()])
    stream = past_waits(torch.device("cuda", torch.cuda.current_device()))
    driver.call("cuMemcpyHtoDAsync", state, words.data_ptr(), words.nbytes, stream.cuda_stream)
    stream.synchronize()


@cache
def _page() -> torch.Tensor:
    """The memory of the report, which devices may write as long as the process lives."""
    atexit.register(_leave)
    return torch.zeros(ctypes.sizeof(_Report), dtype=torch.uint8, pin_memory=True)


def failure() -> WaitTimeoutError | None:
    """The error of a grid of this process that has ended with a report; None if there is none."""
    if not _is_begun:
        return None
    report = _Report.from_address(_page().data_ptr())
    return _error(report) if report.is_complete else None


def _error(report: Any) -> WaitTimeoutError:
    kernel, barrier = report.names.decode().split(" ")
    lines = {_line(launch, barrier) for one in _launches[kernel] if (launch := one())}
    block = ", ".join(map(str, report.block))
    return WaitTimeoutError(
        f"{kernel}, block ({block}): waited {_limit_s:g} s for a phase of parity {report.parity} of the mbarrier "
        f"{barrier}[{report.index}]",
        hint="if the program has this barrier, tilescale.emulate shows which threads do not arrive; otherwise report a "
        "fault of the compiler, with kernel.source; start the process again, as its GPU refuses further work",
        where=lines.pop() if len(lines) == 1 else None,
    )


def _line(launch: Launch, barrier: str) -> Location | None:
    """The line of the only wait for a barrier of the user, or of the only pipelined loop, whose barriers the compiler
    makes; otherwise of the launch."""
    waits, loops = set(), set()
    for stmt, _, _ in statements(launch):
        if ir.is_pipelined(stmt):
            loops.add(location(stmt, "a stage of this loop stays incomplete"))
        elif isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.WAIT_BARRIER_PARITY:
            if BarrierWait.of(stmt.value).barrier.buffer.name == barrier:
                waits.add(location(stmt, "waits here"))
    found = waits or loops
    return found.pop() if len(found) == 1 else launch.where


def check(error: BaseException) -> None:
    """Raise the error of a grid that has ended with a report in place of CUDA's, which any later call gets."""
    global _is_raised
    if (found := failure()) is not None:
        _is_raised = True
        raise found from error


@contextmanager
def checked() -> Iterator[None]:
    """Within the block errors of CUDA are replaced as by `check`."""
    try:
        yield
    except RuntimeError as error:
        check(error)
        raise


def _leave() -> None:
    """At process exit: report an unread failure."""
    if not _is_raised and (error := failure()) is not None:
        sys.excepthook(type(error), error, None)
