# SPDX-License-Identifier: MIT
"""Thread-dependent names of a program."""

from __future__ import annotations

from tilelang_core import ir, tl
from tilescale.program.model import Launch

_THREAD_CALLS = tl.GET_WARP_OR_LANE


class ThreadNames:
    """The names of a program that depend on the thread index."""

    def __init__(self, launch: Launch):
        self._names = {var for var, _ in launch.thread_vars}

    def note(self, bind: ir.Bind) -> None:
        """A name that is bound."""
        if self.is_divergent(bind.value):
            self._names.add(bind.var)

    def is_divergent(self, expr: ir.PrimExpr) -> bool:
        """Whether an expression depends on the thread index."""
        if ir.variables(expr) & self._names:
            return True
        return ir.contains(expr, lambda n: (ir.op_name(n) or "").startswith(_THREAD_CALLS))
