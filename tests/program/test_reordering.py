# SPDX-License-Identifier: MIT
"""Statements that the dependence graph calls independent may be exchanged: random programs, in both orders."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.program.support import H200, taken_apart
from tilelang_core import ir
from tilescale.errors import RaceError, UninitializedReadError
from tilescale.program.dependence import Dependence
from tilescale.program.effects import phases
from tilescale.program.model import DevicePhase, Program

DEVICES, BLOCKS, WIDTH, PLACES = 2, 2, 16, 3

Action = tuple[str, int, int]
"""An action with its tile, row or slot, and another one."""


def program_of(started: tuple[Action, ...], blocks: tuple[Action, ...]) -> Any:
    """A program that does some things on each device, then some in each block."""

    @T.prim_func
    def f(
        X: T.Tensor((BLOCKS, PLACES, WIDTH), "float32"),
        Y: T.Tensor((BLOCKS, PLACES, WIDTH), "float32"),
        inbox: T.Tensor((PLACES, BLOCKS, WIDTH), "float32"),
        whole: T.Tensor((PLACES, BLOCKS, PLACES, WIDTH), "float32"),
    ):
        with T.Kernel(device=DEVICES, block=BLOCKS, threads=32) as b:
            F = T.alloc_flags((PLACES, BLOCKS))
            G = T.alloc_flags((PLACES, BLOCKS))
            H = T.alloc_flags((PLACES,))
            with T.Scale("device") as (rank, _):
                for what, n, m in started:
                    if what == "fill":
                        T.fill(X[n % BLOCKS : n % BLOCKS + 1, 0:PLACES, 0:WIDTH], float(m))
                    if what == "start":
                        T.copy(X, whole[n, 0:BLOCKS, 0:PLACES, 0:WIDTH], dst=1 - rank, signal=H[n])
                    if what == "barrier":
                        T.barrier()
                    if what == "wait":
                        T.wait(H[n], ">=", 1)
                    if what == "take":
                        T.copy(whole[n, 0:BLOCKS, 0:PLACES, 0:WIDTH], Y)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tiles = [T.alloc((WIDTH,), "float32") for _ in range(PLACES)]
                for what, n, m in blocks:
                    if what == "fill":
                        T.fill(tiles[n], float(m))
                    if what == "load":
                        T.copy(X[b, m, 0], tiles[n])
                    if what == "store":
                        T.copy(tiles[n], Y[b, m, 0])
                    if what == "half":
                        T.copy(tiles[n][0 : WIDTH // 2], Y[b, m, 0 : WIDTH // 2])
                    if what == "add":
                        for i in T.Parallel(WIDTH // 2):
                            tiles[n][i] = tiles[m][i + WIDTH // 2] + tiles[n][i]
                    if what == "put":
                        T.copy(tiles[m], inbox[n, b, 0], dst=1 - rank)
                    if what == "send":
                        T.copy(tiles[m], inbox[n, b, 0], dst=1 - rank, signal=F[n, b])
                    if what == "tell":
                        T.signal(G[n, b], dst=1 - rank)
                    if what == "wait":
                        T.wait(F[n, b], ">=", 1)
                    if what == "hear":
                        T.wait(G[n, b], ">=", 1)
                    if what == "take":
                        T.copy(inbox[n, b, 0], tiles[m])
                    if what == "arrived":
                        T.wait(H[n], ">=", 1)
                    if what == "look":
                        T.copy(whole[n, b, 0, 0], tiles[m])

    return f


def statements(program: Program, *, on_device: bool) -> list[ir.Stmt]:
    """One statement for each action of a phase."""
    (phase,) = (p for p, _ in phases(program.body) if isinstance(p, DevicePhase) == on_device)
    found: list[ir.Stmt] = []

    def visit(stmt: ir.Stmt) -> None:
        if isinstance(stmt, ir.Evaluate) or isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
            found.append(stmt)
        else:
            for inner in ir.children(stmt):
                visit(inner)

    visit(phase.stmt)
    return found


def outcome(func: Any) -> list[torch.Tensor]:
    """Results of a run on all devices; raises the errors of the checks."""
    shapes = [(BLOCKS, PLACES, WIDTH)] * 2 + [(PLACES, BLOCKS, WIDTH), (PLACES, BLOCKS, PLACES, WIDTH)]
    numbers = [torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for shape in shapes]
    per_device = [[tensor * (i + 1) + d for i, tensor in enumerate(numbers)] for d in range(DEVICES)]
    tilescale.emulate(func, per_device, machine=H200, check="all")
    return [tensor for tensors in per_device for tensor in tensors]


AFTER = {
    "tell": ("put",),
    "wait": ("send", "start"),
    "hear": ("tell",),
    "take": ("wait", "hear"),
    "arrived": ("started",),
    "look": ("arrived",),
}
"""Actions that require an earlier one in the same place."""
ONCE = {"start": "arrival", "send": "arrival", "put": "arrival", "tell": "told"}
"""Actions that happen in a place at most once."""


def possible(actions: list[Action], before: tuple[Action, ...] = ()) -> tuple[Action, ...]:
    """The actions that can be, in a phase that follows others."""
    kept: list[Action] = []
    done = {("started", n) for what, n, _ in before if what == "start"}
    for what, n, m in actions:
        if what in AFTER and not any((other, n) in done for other in AFTER[what]) or (ONCE.get(what), n) in done:
            continue
        done |= {(what, n), (ONCE.get(what, what), n)}
        kept.append((what, n, m))
    return tuple(kept)


number = st.integers(0, PLACES - 1)


def lists(kinds: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[list[Action]]:
    return st.lists(st.tuples(st.sampled_from(kinds), number, number), min_size=least, max_size=most)


on_devices = lists(("start", "start", "wait", "take", "fill", "barrier"), 0, 4)
ON_TILES = ("fill", "load", "store", "half", "add")
BETWEEN = ("put", "send", "send", "tell", "wait", "wait", "hear", "take", "arrived", "look")
in_blocks = lists(ON_TILES + BETWEEN, 4, 10)


def swapped(actions: tuple[Action, ...], graph: Dependence, *, on_device: bool, odd: int) -> tuple[Action, ...]:
    """The actions, in which neighbours that are independent have changed places, each at most once."""
    stmts, result, at = statements(graph.program, on_device=on_device), list(actions), odd
    assert len(stmts) == len(actions)
    while at + 1 < len(actions):
        if graph.independent(stmts[at], stmts[at + 1], on_device=on_device):
            result[at : at + 2] = result[at + 1], result[at]
            at += 1
        at += 1
    return tuple(result)


@settings(deadline=None, max_examples=15)
@given(on_devices, in_blocks, st.integers(0, 1))
def test_what_is_independent_may_change_places(started: list[Action], blocks: list[Action], odd: int):
    first = possible(started)
    then = (*(("fill", tile, tile) for tile in range(PLACES)), *possible(blocks, first))
    func = program_of(first, then)
    graph = Dependence(taken_apart(func), H200)
    other = (
        swapped(first, graph, on_device=True, odd=odd) if first else (),
        swapped(then, graph, on_device=False, odd=odd),
    )
    assume(other != (first, then))
    try:
        expected = outcome(func)
    except (RaceError, UninitializedReadError):
        assume(False)
    for a, b in zip(outcome(program_of(*other)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
