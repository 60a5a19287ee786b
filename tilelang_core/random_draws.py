# SPDX-License-Identifier: MIT
"""Random numbers of a function after lowering: their threads, order and vectors.

Numbers depend on which thread executes an iteration of parallel loops, in which order, and on whether one call of
cuRAND draws for several of them. Each call gets a number as an additional argument, by which it is found again in what
TileLang's passes make of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tilelang
from tilelang import tvm

from tilelang_core import ir, logs, tl
from tilelang_core.layouts import TileLayout
from tilelang_core.lru import LruCache
from tilelang_core.mends import mended
from tilelang_core.rewrite import recall, rewrite

CALLS = tl.RNG_RAND, tl.RNG_RAND_FLOAT
_LAYOUT = "parallel_loop_layout"


@dataclass(frozen=True)
class LoopDraws:
    """The draws of a nest of parallel loops.

    Attributes:
        layout: threads of iterations, and their positions among those of their thread.
        lanes: iterations of a thread that draw at the same time.
    """

    layout: TileLayout
    lanes: int


@dataclass(frozen=True)
class RandomDraws:
    """The calls of a function that draw random numbers.

    Attributes:
        loops: those in parallel loops whose order is known.
        lanes: number of lanes of the vector that each call of the lowered function draws.
    """

    loops: Mapping[ir.Call, LoopDraws] = field(default_factory=dict)
    lanes: Mapping[ir.Call, int] = field(default_factory=dict)


_found: LruCache[tuple[ir.PrimFunc, str], RandomDraws] = LruCache(64)


def random_draws(func: ir.PrimFunc, target: Any) -> RandomDraws:
    """The draws of a function for a target; none of a function that cannot be lowered."""
    return _found.made((func, str(target)), lambda: _find(func, tvm.target.Target(target)))


def _find(func: ir.PrimFunc, target: Any) -> RandomDraws:
    calls: list[ir.Call] = []

    def number(node: Any) -> Any:
        if ir.op_name(node) not in CALLS:
            return None
        calls.append(node)
        return recall(node, [*node.args, ir.int_node(len(calls) - 1)])

    numbered, seen = func.with_body(rewrite(func.body, enter=number)), _Layouts()
    config = dict(func.attrs.get("tilelang_pass_configs", {})) if func.attrs else {}
    try:
        with logs.following(), tvm.transform.PassContext(opt_level=3, config=config, instruments=[seen]), target:
            lowered = tilelang.lower(mended(numbered), target=target).device_mod
    except Exception:  # noqa: BLE001 - compiling the program reports the error
        return RandomDraws()
    groups = [group for kernel in lowered.functions.values() for group in _groups(kernel.body)]
    inside = {number: group.depth for group in _groups(numbered.body) for number in group.calls}
    loops = {
        calls[number]: LoopDraws(layout, lanes)
        for layout, numbers in seen.found
        if not layout.replicated and (lanes := _lanes(numbers, groups, inside))
        for number in numbers
    }
    return RandomDraws(loops, {calls[number]: group.lanes for group in groups for number in group.calls})


@tvm.instrument.pass_instrument
class _Layouts:
    """Keeps the layouts of parallel loops that TileLang infers, and the numbers of the calls in them."""

    def __init__(self) -> None:
        self.found: list[tuple[TileLayout, frozenset[int]]] = []

    def run_after_pass(self, module: Any, info: Any) -> None:
        """A pass has ended."""
        if not str(info.name).endswith("LayoutInference"):
            return
        loops = [s for f in module.functions.values() for s in ir.statements(f.body) if isinstance(s, ir.For)]
        self.found = [(TileLayout.of(loop.annotations[_LAYOUT]), numbers) for loop in loops
                      if _LAYOUT in loop.annotations and (numbers := frozenset(_numbers(loop)))]  # fmt: skip


def _numbers(node: Any) -> list[int]:
    return [ir.integer(call.args[-1]) for call in ir.nodes(node, lambda n: ir.op_name(n) in CALLS)]


@dataclass(frozen=True)
class _Group:
    """Calls that draw together: for each of some lanes in turn, in order."""

    calls: tuple[int, ...]
    lanes: int
    depth: int


def _groups(stmt: ir.Stmt, depth: int = 0) -> Iterator[_Group]:
    """The groups of a statement in program order. Depth counts loops around them, but for parallel ones."""
    inner = list(ir.children(stmt))
    vectors: list[_Group] = []

    def visit(node: Any) -> None:
        if isinstance(node, ir.Broadcast) and (numbers := _numbers(node)):
            vectors.append(_Group(tuple(numbers), ir.integer(node.lanes), depth))

    own = [stmt] if not inner else [stmt.condition] if isinstance(stmt, ir.IfThenElse | ir.While) else []
    for node in own:
        ir.walk(node, visit)
        known = {number for group in vectors for number in group.calls}
        yield from vectors
        yield from (_Group((number,), 1, depth) for number in _numbers(node) if number not in known)
    within = depth + isinstance(stmt, ir.For | ir.While)
    if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        within = 0
    for child in inner:
        yield from _groups(child, within)


def _lanes(numbers: frozenset[int], groups: list[_Group], inside: Mapping[int, int]) -> int | None:
    """Number of iterations of a thread that draw at the same time in a nest with these calls; None where it differs."""
    found = {group for group in groups if numbers & set(group.calls)}
    if {number for group in found for number in group.calls} != numbers:
        return None
    if len(found) == 1:
        (group,) = found
        return group.lanes if len(group.calls) == 1 else 1
    alike = {(group.lanes, group.depth - inside[group.calls[0]]) for group in found}
    return next(iter(alike))[0] if len(alike) == 1 and len(found) == len(numbers) else None
