# SPDX-License-Identifier: MIT
"""Emulated programs of tests, run again: lowered to CUDA (`--lower`), or run on GPUs (`gpu/plugin.py`).

A program that the emulator accepts must run on GPUs. So after each successful emulation `tilescale.emulate` hands the
program on, unless it was not checked whole (it may race), is for another machine, or was emulated without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
import torch

import tilescale
from tests.kernels.base import PlainKernel
from tilescale.backends.base import Target
from tilescale.backends.cuda import support
from tilescale.errors import ShapeError, TileScaleError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.model import Program

MACHINE = "h200-sxm-8"
"""Machine of programs that name none."""

PROGRAMS_OF_A_TEST = 6
"""More of one test, such as hypothesis makes, are only emulated."""

SAMPLE = 64
"""With --lower=sample, one in this number of cases of a test is lowered, in addition to its first."""

NO_LAYOUT = "no available layout found"
"""TileLang's error about tiles in registers that it cannot distribute over the threads, such as 3 x 11 over 32."""

_emulate = tilescale.emulate


@dataclass
class Again:
    """Replacement of `tilescale.emulate`.

    Attributes:
        hand_on: called with the program, a copy of the arguments, and the arguments after the emulation, for each unit;
            returns the reason if it did nothing.
        devices: number of devices of the launches that it takes; None for any number.
        architecture: what the programs are compiled for.
        times: how often one program is handed on.
        test: the test that runs.
        reasons: reason -> number of emulations that were not handed on; "" counts those that were.
    """

    hand_on: Callable[[Program, list[list[Any]], list[list[Any]]], str | None]
    devices: int | None = None
    architecture: str = "sm_90a"
    times: int = 1
    test: pytest.Item | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    _programs: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _of_test: int = 0

    def begin(self, test: pytest.Item) -> None:
        self.test, self._of_test = test, 0

    def emulate(self, func: Any, args: Sequence[Any] | None = None, **options: Any) -> Any:
        """Emulate, and hand the program on."""
        reason = self._reason(func, args, options)
        given = [] if reason else [[copied(a) for a in unit] for unit in _per_unit(args)]
        report = _emulate(func, args, **options)
        if reason is None:
            # keeps the program alive, so that its id is not reused
            self._programs[id(func)] = func, self._done(func) + 1
            self._of_test += 1
            program = analyse(func, Machine.load(MACHINE))
            reason = _reason_against(program) or self.hand_on(program, given, _per_unit(args))
        self.reasons[reason or ""] = self.reasons.get(reason or "", 0) + 1
        return report

    def _reason(self, func: Any, args: Sequence[Any] | None, options: dict[str, Any]) -> str | None:
        if options.get("check") not in (None, "all"):
            return "not checked whole"
        if options.get("machine") is not None:
            return "for another machine"
        if args is None or not options.get("data", True):
            return "for its time only"
        if self._done(func) == self.times:
            return "done before"
        if self._of_test == PROGRAMS_OF_A_TEST:
            return "enough of one test"
        if self.devices not in (None, len(_per_unit(args))):
            return "on another number of devices"
        kernel = _plain_kernel(self.test)
        if kernel is not None and self.architecture not in kernel.targets:
            return f"not for {self.architecture}"
        return None

    def _done(self, func: Any) -> int:
        return self._programs.get(id(func), (func, 0))[1]


def copied(value: Any, device: torch.device | str = "cpu") -> Any:
    """A copy on a device, with the same strides."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device).copy_(value)


def _plain_kernel(test: pytest.Item | None) -> PlainKernel | None:
    """Kernel of the collection that a test is about, if any."""
    found = test.callspec.params.get("kernel") if hasattr(test, "callspec") else None
    return found if isinstance(found, PlainKernel) else None


def _per_unit(args: Sequence[Any]) -> list[list[Any]]:
    return [list(a) for a in args] if all(isinstance(a, list | tuple) for a in args) else [list(args)]


def _reason_against(program: Program) -> str | None:
    """Why CUDA GPUs do not run a program; None if they do."""
    try:
        _lowered(program)
    except TileScaleError as error:
        return error.message
    return None


def _lowered(program: Program) -> Any:
    return support.lower(program, Target.of(program, Machine.load(MACHINE)))


def _lower(program: Program, _given: Any, _found: Any) -> str | None:
    try:
        _lowered(program).source({})
    except ShapeError as error:
        if NO_LAYOUT in str(error.__cause__):
            return NO_LAYOUT
        raise
    return None


_lowering = Again(_lower)


def _in_sample(test: pytest.Item) -> bool:
    """Whether a test is the first case of its function, or chosen by its name, the same in every run."""
    first = not hasattr(test, "callspec") or not any(test.callspec.indices.values())
    return first or crc32(test.nodeid.encode()) % SAMPLE == 0


@pytest.fixture(autouse=True)
def lowered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --lower, what all tests or a sample of them emulate is lowered to CUDA, and the text checked.

    The collection's kernels are not: `tests/test_plain_tilelang.py` makes their texts.
    """
    asked = request.config.getoption("--lower")
    chosen = asked == "all" or (asked == "sample" and _in_sample(request.node))
    if chosen and tilescale.emulate is _emulate and _plain_kernel(request.node) is None:
        _lowering.begin(request.node)
        monkeypatch.setattr(tilescale, "emulate", _lowering.emulate)
