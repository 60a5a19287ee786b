# SPDX-License-Identifier: MIT
"""Which tensors a call has to pass: those that some statement names. Others may be None, as in TileLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir
from tilescale.errors import ArgumentError
from tilescale.program.effects import statements
from tilescale.program.model import Program


def used_parameters(program: Program) -> frozenset[int]:
    """Positions of the tensors that some statement names, whether or not a call reaches it."""
    used = {var for stmt, _, _ in statements(program.body) for var in ir.uses(stmt)}
    return frozenset(
        i
        for i, p in enumerate(program.parameters)
        if p.buffer is not None and used & {p.buffer.data, *(view.data for view in p.views)}
    )


def check_present(program: Program, values: Sequence[Any], outputs: Sequence[int] = ()) -> None:
    """Check the arguments of a call; `outputs` are positions that the call fills.

    Raises:
        ArgumentError: a tensor is None that the program uses.
    """
    absent = {i for i, value in enumerate(values) if value is None} - set(outputs)
    missing = absent & used_parameters(program) if absent else absent
    if missing:
        names = ", ".join(repr(program.parameters[i].name) for i in sorted(missing))
        raise ArgumentError(
            f"{names} is None, and {program.name!r} uses it",
            hint="pass a tensor; one that no statement names may be None",
        )
