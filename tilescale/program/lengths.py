# SPDX-License-Identifier: MIT
"""How many rows the tensors of an all-to-all of unequal parts have: the one extent in which ranks may differ."""

from __future__ import annotations

from collections import Counter

from tilelang_core import ir
from tilescale.program.effects import phases, statements
from tilescale.program.model import Parameter, Program
from tilescale.program.operations import Collective, operation
from tilescale.program.ops import ALL_TO_ALL_V

UNFIT = "sent has a number from 0 on for each rank, and no more rows than src; dst has room for all that come"
"""What to do about rows that do not fit."""


def unfit(gets: bool, rows: object, room: int) -> str:
    """Rows that do not fit a rank's tensor, in words: those that it `gets`, or else sends."""
    return f"{'gets' if gets else 'sends'} {rows} rows, {'dst' if gets else 'src'} has {room}"


def lengths(program: Program) -> frozenset[ir.Var]:
    """Those on which nothing depends but where such a tensor ends. All others are one number for the whole program."""
    ends: Counter[ir.Var] = Counter()
    uses: Counter[ir.Var] = Counter()
    for stmt, *_ in statements(program.body):
        uses.update(ir.uses(stmt))
        if isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == ALL_TO_ALL_V.name:
            made = operation(stmt.value)
            assert isinstance(made, Collective)
            rows = (ir.region_parts(tile)[2][0] for tile in made.tiles)
            ends.update(n for n in rows if isinstance(n, ir.Var))
    launches = {launch for _, launch in phases(program.body) if launch is not None}
    decided = [n for launch in launches for n in launch.grid]
    decided += [n for launch in launches for buffer in launch.buffers for n in buffer.shape]
    fixed = {var for expr in decided for var in ir.variables(expr)}
    return frozenset(var for var, count in ends.items() if uses[var] == count and var not in fixed)


def agreed(program: Program) -> list[tuple[Parameter, ir.Var]]:
    """The other variables of extents, which all ranks have alike, and the parameters that have them, in their order."""
    own = lengths(program)
    extents = [(p, extent) for p in program.parameters if p.buffer is not None for extent in p.buffer.shape]
    return [(p, var) for p, extent in extents for var in sorted(ir.variables(extent) - own, key=str)]
