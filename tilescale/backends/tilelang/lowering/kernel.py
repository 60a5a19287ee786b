# SPDX-License-Identifier: MIT
"""The last stage: a phase as a TileLang function, with all of its parameters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tilelang_core import ir, specialise, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.headers import header
from tilescale.backends.tilelang.lowering.arguments import Argument, KernelParameters, PeerInstances, WaitSite
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.errors import Location
from tilescale.program.model import Program
from tilescale.program.ops import TASKS


@dataclass(frozen=True)
class LoweredKernel:
    """A grid phase as a TileLang function.

    Attributes:
        func: the function that stock TileLang compiles.
        arguments: its arguments, in the order of parameters.
        sites: the waits, by number.
        notes: the chosen implementations, for messages.
        where: the user's launch.
        reached: positions of parameters that peers reach.
        libraries: names of the device libraries that it calls.
        ahead: names of the tensors that a producer loads ahead of the consumers' waits.
        free: names of the tensors that a producer loads ahead of its own waits, too.
    """

    func: ir.PrimFunc
    arguments: tuple[Argument, ...]
    sites: tuple[WaitSite, ...]
    notes: tuple[str, ...]
    where: tuple[Location, ...] = ()
    reached: frozenset[int] = frozenset()
    libraries: frozenset[str] = frozenset()
    ahead: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()

    @cached_property
    def digest(self) -> str:
        """Of the function's script, with its device functions."""
        return hashlib.sha256(self.func.script(show_meta=True).encode()).hexdigest()


@cache
def prelude(package: str, *headers: str) -> str:
    """The device functions of a kernel, some from the package of an instruction set; a part of its text, so of every
    cache key."""
    return "".join(header(name, package) + "\n" for name in ("memory.cuh", "sync.cuh", "combine.cuh", *headers))


def lower(phase: Phase) -> LoweredKernel:
    """A phase after all stages, as a function."""
    signature = phase.signature
    assert signature is not None, "the stage of devices has found out what the kernel takes"
    order = sorted(range(len(signature.arguments)), key=lambda i: signature.parameters[i][1] is not None)
    func = tir.function(
        f"{phase.program.name}_{phase.number}",
        [signature.parameters[i] for i in order],
        _nest(phase, _ordered(phase.stmt)),
        _attributes(phase.program, _rules_out_producers(phase, signature)),
    )
    arguments = tuple(signature.arguments[i] for i in order)
    return LoweredKernel(
        func,
        arguments,
        signature.sites,
        (*phase.notes, *phase.graph.lines()),
        where=(phase.launch.where,) if phase.launch.where else (),
        reached=signature.reached | {a.position for a in arguments if isinstance(a, PeerInstances)},
        libraries=signature.libraries,
        ahead=signature.ahead,
        free=signature.free,
    )


def _rules_out_producers(phase: Phase, signature: KernelParameters) -> bool:
    is_left = bool(signature.sites or phase.roles.tiles) and not phase.graph.is_stock
    return phase.ordered or is_left


def _nest(phase: Phase, body: ir.Stmt) -> ir.Stmt:
    """The launch in TileLang's form, around the new body."""
    launch, used = phase.launch, {node.buffer.data for node in ir.instances(body, ir.BufferLoad, ir.BufferStore)}
    on_chip = [b for b in (*launch.buffers, *phase.tiles) if b.scope() != "global" and b.data in used]
    annotations = {k: v for k, v in launch.notes if not k.startswith("tilescale.")}
    moments = f"#define TILESCALE_MOMENTS {phase.program.moments}\n" if phase.program.moments else ""
    # A call would keep registers of roles from being reallocated.
    has_far_failures = TASKS in dict(launch.notes) and not any(role.registers for role in phase.graph.roles)
    tasks = "#define TILESCALE_TASKS\n" if has_far_failures else ""
    text = moments + tasks + prelude(phase.target.headers, *phase.headers) + phase.text
    annotations["pragma_import_c"] = text + str(annotations.get("pragma_import_c", ""))
    if added := phase.graph.added:
        annotations[tl.LAUNCH_THREADS] = [launch.thread_count + added, 1, 1]
    arrivals = {data: counts for data, counts in phase.arrivals.items() if data in used}
    if arrivals:
        annotations["barrier_init"] = {**annotations.get("barrier_init", {}), **arrivals}
    programs = list(zip(launch.programs, launch.grid, strict=True))
    return tir.launch_nest(programs, launch.thread_vars, on_chip, annotations, body)


def _attributes(program: Program, ordered: bool) -> dict[str, Any]:
    """Attributes of the function: the program's pass settings.

    Branches on the thread index and waits rule out TileLang's own warp specialization, which silently drops statements
    of one branch and moves loads ahead of waits. A value that was read once must not be read again: inside an `if`
    TileLang reads it again at each use, and misses writes by atomic operations or calls in between
    (github.com/tile-ai/tilelang/issues/2594).
    """
    attrs = program.func.attrs
    given = dict(attrs["tilelang_pass_configs"]) if attrs and "tilelang_pass_configs" in attrs else {}
    settings = {**given, tl.INLINE_BINDS_OF_IF: False}
    return {"tilelang_pass_configs": {**settings, specialise.DISABLE: True} if ordered else settings}


def _ordered(body: ir.Stmt) -> ir.Stmt:
    """A body with its rasterization (`T.use_swizzle`) around all of it: statements before it would not use the new
    order."""
    orders: list[ir.AttrStmt] = []

    def leave(node: ir.Node) -> Any:
        if not isinstance(node, ir.AttrStmt) or str(node.attr_key) != tir.BLOCK_ORDER:
            return None
        orders.append(node)
        return node.body

    plain = tir.rewrite(body, leave=leave)
    return ir.AttrStmt(orders[0].node, orders[0].attr_key, orders[0].value, plain) if orders else plain
