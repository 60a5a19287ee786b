# SPDX-License-Identifier: MIT
"""Programs with extents that are known at launch only: decided for likely values, proven for all.

The schedule of such a program is that of the same program with numbers in place of its symbolic extents.
"""

from __future__ import annotations

from tilelang_core import ir
from tilescale.program.model import Program

LIKELY = 4096
"""Value of a symbolic extent for decisions."""


def likely_extents(program: Program) -> dict[ir.Var, int]:
    """The symbolic extents of a program's tensors, each with a likely value."""
    units = {var for _, extent in program.extents for var in ir.variables(extent)}
    extents = [extent for p in program.parameters if p.buffer is not None for extent in p.buffer.shape]
    return {var: LIKELY for extent in extents for var in sorted(ir.variables(extent) - units, key=str)}
