# SPDX-License-Identifier: MIT
"""A rerun, of the same program or of one with another statement, on the arguments of the first run.

Integers that the program writes are saved before the first run: flags and counters decide control flow. Other tensors
are copied as the first run left them, because values that the program wrote there do not affect control flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator.arguments import bind_arguments
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.pairs import Pairs
from tilescale.backends.emulator.run import Run
from tilescale.errors import TileScaleError
from tilescale.hda import Machine
from tilescale.passes.mod_analysis import written_parameters
from tilescale.passes.pipeline import analyse
from tilescale.program.model import Program


class Given:
    """The arguments of a run; integer tensors that it writes are copied first."""

    def __init__(self, program: Program, per_unit: Sequence[Sequence[Any]]):
        self._program, self._per_unit = program, per_unit
        written = written_parameters(program)
        integers = (unit[i] for unit in per_unit for i in written if i < len(unit) and _is_integer(unit[i]))
        self._before = {_key(tensor): tensor.clone() for tensor in integers}

    def copies(self, zeroed: frozenset[str]) -> list[list[Any]]:
        """Copies of the arguments, one per distinct tensor. Parameters named in `zeroed` are zero in them."""
        made: dict[Any, Any] = {}

        def copy(name: str, value: Any) -> Any:
            if not hasattr(value, "clone"):
                return value
            key = _key(value)
            if key not in made:
                made[key] = self._before.get(key, value).clone()
            return made[key].zero_() if name in zeroed else made[key]

        names = [parameter.name for parameter in self._program.parameters]
        return [list(map(copy, names, unit)) for unit in self._per_unit]


def _is_integer(value: Any) -> bool:
    dense = str(getattr(value, "layout", "")) == "torch.strided"
    return dense and not value.is_floating_point() and not value.is_complex()


def _key(tensor: Any) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class Again:
    """Reruns functions under the conditions of a failed run."""

    machine: Machine
    given: Given
    extents: list[tuple[str, int]]
    mesh: tuple[int, ...]
    seed: int | None
    checks: Sequence[Observer]

    def run(
        self,
        func: ir.PrimFunc,
        watching: Sequence[Observer],
        zeroed: frozenset[str] = frozenset(),
        seed: int | None = None,
    ) -> TileScaleError | None:
        """The error with which a run ends; None if it succeeds."""
        program = analyse(func, self.machine)
        run = Run(program, self.machine, lambda count: None, watching, self.seed if seed is None else seed)
        pairs = Pairs()
        values = bind_arguments(run.compiler, program, self.extents, self.given.copies(zeroed), run.written, pairs)
        try:
            run.launch(self.extents, values, self.mesh)
        except TileScaleError as error:
            return error
        return None

    def is_clean(self, func: ir.PrimFunc, zeroed: frozenset[str], seed: int | None) -> bool:
        """Whether a function runs without an error, under the same checks."""
        try:
            return self.run(func, [type(check)() for check in self.checks], zeroed, seed) is None
        except TileScaleError:  # not a program of the language
            return False
