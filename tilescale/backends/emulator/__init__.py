# SPDX-License-Identifier: MIT
"""The emulator: runs any program for any described machine on the CPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.backends.base import Backend, Executable, Target
from tilescale.errors import UnsupportedError
from tilescale.program.model import Program


@dataclass(frozen=True)
class _Emulated:
    """Any program on any machine: nothing is lowered before the first call."""

    program: Program
    target: Target
    notes: tuple[str, ...] = ()

    def source(self, options: dict[str, Any]) -> str:
        raise UnsupportedError("the emulator generates no text")

    def compilations(self, options: dict[str, Any]) -> tuple[()]:
        return ()

    ahead = compilations

    def build(self, options: dict[str, Any]) -> Executable:
        from tilescale.backends.emulator.emulate import emulate_program, simulated_s

        program, machine, kept = self.program, self.target.machine, dict[Hashable, Any]()
        return Executable(
            lambda per_unit: emulate_program(program, machine, per_unit, kept=kept),
            gathers=True,
            device="cpu",
            simulated_s=lambda values: simulated_s(program, machine, values),
        )


def _simulated_us(func: ir.PrimFunc, args: Sequence[Any] | None, **options: Any) -> float:
    from tilescale.backends.emulator.emulate import emulate

    return emulate(func, args, data=False, progress=False, **options).time_us


BACKEND = Backend("emulator", available=lambda: True, lower=_Emulated, priority=0, simulated_us=_simulated_us)
