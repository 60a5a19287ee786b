# SPDX-License-Identifier: MIT
"""Names in parallel loops, inlined before stock TileLang's first Simplify.

Simplify inlines them itself, but computes the bounds of each name first: for each occurrence of a loop variable in its
value, a new analyzer asks Z3 in a new context of megabytes. The rows of a tile, `row = m + i`, contain the loop
variable of their grid some 20 times: the names of two such loops took 60 % of a GEMM's passes up to its roles. The text
is the same.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core.ir import is_pure, walk


def with_inlined_names(stmt: tirx.Stmt) -> tirx.Stmt:
    """The statement itself, or if it has such names of integers one that computes the same without them."""
    values: dict[tirx.Var, tirx.PrimExpr] = {}

    def named(node: Any) -> None:
        if isinstance(node, tirx.Bind) and str(node.var.dtype).startswith("int") and is_pure(node.value):
            values[node.var] = stmt_functor.substitute(node.value, values)

    def in_parallel(node: Any) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            walk(node.body, named)

    def leave(node: tirx.Bind) -> Any:
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if node.var in values else None

    walk(stmt, in_parallel)
    if not values:
        return stmt
    return stmt_functor.substitute(stmt_functor.ir_transform(stmt, None, leave, ["tirx.Bind"]), values)
