# SPDX-License-Identifier: MIT
"""Device memory of a program as parameters: the caller passes it, and several programs may share it.

Why: memory that a program allocates is its own, of each shape, for as long as it lives. Before: a launch allocates
tensors in device memory. After: these are parameters of the function, after all others, in the order of allocation.
Flags stay, as they have to be zero when a call begins.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.program.ops import FLAGS


def as_parameters(func: ir.PrimFunc) -> ir.PrimFunc:
    """The function with the device memory of its launches among its parameters."""
    taken: list[ir.Buffer] = []

    def leave(node: Any) -> Any:
        if not isinstance(node, ir.SBlock) or node.name_hint != tir.LAUNCH:
            return None
        flags = dict(node.annotations.get(FLAGS, {}))
        own = [b for b in node.alloc_buffers if ir.scope_kind(b) == "global" and b.data not in flags]
        taken.extend(own)
        kept = [buffer for buffer in node.alloc_buffers if buffer not in own]
        return ir.SBlock([], [], [], node.name_hint, node.body, None, kept, [], node.annotations)

    body = tir.rewrite(func.body, leave=leave)
    added = {ir.Var(f"{buffer.name}_handle", "handle"): buffer for buffer in taken}
    return ir.PrimFunc([*func.params, *added], body, func.ret_type, {**dict(func.buffer_map), **added}, func.attrs)
