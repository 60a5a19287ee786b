# SPDX-License-Identifier: MIT
"""Programs' operations between devices that do not share memory: by NVSHMEM, where machine and job have it.

Why: loads and stores cannot reach other nodes; NVSHMEM's functions can, started by a program. Before: copies, signals,
barriers and collectives of programs. After: the same, with those between devices that do not all share memory marked as
NVSHMEM's, which stages and rules ask for, and collectives with their algorithm. Declines operations where machine or
job have no NVSHMEM, with a remedy.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.implemented import choice
from tilescale.backends.tilelang.lowering.markers import CARRIED, CARRIER
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.reach import path_between, share_memory, split
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.errors import Location, UnsupportedError
from tilescale.program import ops
from tilescale.program.model import location
from tilescale.program.operations import Collective, operation


def carried(stmt: ir.Stmt, target: LoweringTarget, where: Location | None) -> ir.Stmt:
    """Statements of programs with NVSHMEM's operations marked; `where` is the line around them. Raises
    UnsupportedError: an operation between devices that share no memory, without NVSHMEM; with its line."""
    at = where
    if target.group_size == target.devices:
        return stmt

    def enter(node: ir.Node) -> None:
        nonlocal at
        if isinstance(node, ir.Stmt):
            at = location(node) or at

    def leave(node: ir.Node) -> Any:
        if not isinstance(node, ir.Call) or ir.op_name(node) not in CARRIED:
            return None
        level = ir.attribute(node, "level")
        if level not in dict(target.sizes) or share_memory(target, level):
            return None
        _check(node, level, target, at)
        marks = {CARRIER: IMPL}
        made = operation(node)
        if isinstance(made, Collective) and (mechanism := choice(made, target, in_program=True)) is not None:
            marks["impl"] = mechanism.name
        said = {**dict(node.annotations), **{key: ir.StringImm(value) for key, value in marks.items()}}
        return ir.Call(node.dtype, node.op, list(node.args), said)

    return tir.rewrite(stmt, enter=enter, leave=leave)


def _check(call: ir.Call, level: str, target: LoweringTarget, where: Location | None) -> None:
    asked = ir.attribute(call, "impl") if ir.op_name(call) == ops.COPY.name else None
    if asked == IMPL:
        return  # a job with another heap reports it
    name = f"T.{call.op.name.removeprefix('tilescale.')}"
    found = (
        f"{name} of programs between {level}s: by {target.machine.name!r} these do not all share memory, so no loads "
        "and stores lead there"
    )
    whole = f"whole tensors go by NCCL, from a phase of the {level}s outside T.Scale('block')"
    if all(mechanism.name != IMPL for mechanism in path_between(target).mechanisms):
        raise UnsupportedError(
            found, hint=f"the machine's description has no mechanism {IMPL!r} between them; {whole}", where=where
        )
    if not target.nvshmem:
        raise UnsupportedError(
            found, hint=f"start the job with TILESCALE_HEAP={IMPL}, and NVSHMEM carries it; {whole}", where=where
        )
    if asked is not None:
        raise UnsupportedError(f"{found}: impl={asked!r}", hint=f"leave impl out: {IMPL} carries it", where=where)
    if split(target, level) is None:
        raise UnsupportedError(
            f"{name} of programs between {level}s, of which nodes have different numbers",
            hint="launch node= and device=, with as many devices in each node",
            where=where,
        )
