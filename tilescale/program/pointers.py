# SPDX-License-Identifier: MIT
"""Tables of pointers: tensors that a program makes of numbers in memory, `T.make_tensor(table[i], ...)`."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tl
from tilescale.program.effects import statements
from tilescale.program.model import Program


def is_address(value: Any) -> bool:
    """Whether an expression takes a number as the address of a tensor."""
    return ir.op_name(value) == tl.REINTERPRET and str(value.dtype) == "handle"


def follows_addresses(program: Program) -> bool:
    """Whether a program makes a tensor of an address."""
    return any(isinstance(stmt, ir.Bind) and is_address(stmt.value) for stmt, _, _ in statements(program.body))
