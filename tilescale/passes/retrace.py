# SPDX-License-Identifier: MIT
"""Trace a program again for another machine than it was traced for.

Why: levels, sizes of units and capacities are the machine's, and tracing has used them. It declines functions whose
Python source is not known.
"""

from __future__ import annotations

from tilelang_core import ir, trace
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.program.ops import MACHINE


def for_machine(func: ir.PrimFunc, machine: Machine) -> ir.PrimFunc:
    """`func` as traced for `machine`.

    Raises UsageError: it was not traced; or for another machine, and its Python function is not known.
    """
    if not isinstance(func, ir.PrimFunc):
        found = f"a plain {type(func).__name__}"
        raise UsageError(f"expected a @T.prim_func, got {found}", hint="decorate the function with @T.prim_func")
    traced_for = trace.note_of(func, MACHINE)
    if traced_for in (None, machine.digest):
        return func
    with use_machine(machine):
        again = trace.retrace(func)
    if again is None:
        raise UsageError(
            f"the program was traced for another machine than {machine.name!r}",
            hint=f"trace it for this one: `with tilescale.use_machine({machine.name!r}):` around its definition",
        )
    return again
