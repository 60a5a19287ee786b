# SPDX-License-Identifier: MIT
"""Stores and signals that end iterations of a persistent loop: a store role executes them during the next iteration."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.cuda import lowered_ranks, turn_programs
from tests.cuda.support import bodies, lowered, source
from tests.cuda.test_exchanging import MACHINE, SHAPE, TINY, _by_turns, interleaved, turns  # noqa: F401 - a fixture
from tilelang_core import role_schedule
from tilescale.backends.tilelang.lowering.role_graph.graph import STORE

HANDED = "compute -> store: out; 1 stage"


def test_who_stores_does_nothing_else():
    text = bodies(source(turn_programs.PROGRAMS["counted"](2, SHAPE, 12)))
    computes, loads, stores = re.split(r"tl::warpgroup_reg_(?:de)?alloc<\d+>", text)[1:]
    assert "wgmma" in computes and not re.search(r"tilescale::(?!wgmma_)|tma_", computes)
    assert loads.count("tl::tma_load(") == 2 and "wgmma" not in loads and "tilescale::" not in loads
    assert stores.count("tl::tma_store(") == stores.count("tilescale::signal<") == 1 and "wgmma" not in stores
    assert computes.count("results_full[0].arrive") == stores.count("results_full[0].wait") == 1
    assert computes.count("results_empty[0].wait") == stores.count("results_empty[0].arrive") == 1


def test_a_release_follows_the_store_that_it_tells_of():
    text = bodies(source(turn_programs.PROGRAMS["counted"](2, SHAPE, 12)))
    store, complete, signal = map(text.index, ("tl::tma_store(", "tilescale::complete_stores(", "tilescale::signal<"))
    assert store < complete < signal


# -- what keeps its order ----------------------------------------------------------------------------------------------


@T.macro
def waits_after(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1)
    T.wait(flags[1], ">=", 1)


@T.macro
def stores_nothing_told(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.copy(out, C[row, 0])


@T.macro
def threads_store_too(C, flags, c, out, row, rank):
    for i, j in T.Parallel(128, 256):
        C[row + i, j] = c[i, j]
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1)


@T.macro
def adds_to_what_is_stored(C, flags, c, out, row, rank):
    for i, j in T.Parallel(128, 256):
        c[i, j] += C[row + i, j]
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1)


@T.macro
def stores_and_tells(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1)


@T.macro
def by_rank(C, flags, c, out, row, rank):
    if rank == 0:
        for i, j in T.Parallel(128, 256):
            c[i, j] += 1
        T.copy(c, out)
        T.copy(out, C[row, 0])
    else:
        T.copy(c, out)
        T.copy(out, C[row, 0])
        T.signal(flags[0], 1)


@T.macro
def waits_for_what_it_tells(C, flags, c, out, row, rank):
    T.wait(flags[1], ">=", 1)
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1)


@T.macro
def stores_at_a_peer(C, flags, c, out, row, rank):
    T.wait(flags[1], ">=", 1)
    for i, j in T.Parallel(128, 256):
        c[i, j] += C[row + i, j]
    T.copy(c, out)
    T.copy(out, C[row, 0], dst=1 - rank, signal=flags[1])


@T.macro
def asks_memory(C, flags, c, out, row, rank):
    if flags[2] == 0:
        T.copy(c, out)
        T.copy(out, C[row, 0])
        T.signal(flags[0], 1)


@T.macro
def signals_at_the_end(out, flags):
    T.signal(flags[0], 1)


BESIDE = {
    "a signal": turns(stores_and_tells),
    "in branches": turns(by_rank),
    "flags of both": turns(waits_for_what_it_tells),
    "to a peer": turns(stores_at_a_peer),
}
IN_ORDER = {
    "a wait follows": turns(waits_after),
    "no signal": turns(stores_nothing_told),
    "threads store": turns(threads_store_too),
    "what memory says counts": turns(asks_memory),
    "what there is counts": turns(adds_to_what_is_stored),
    "two loops": turns(stores_and_tells, times=2),
    "more follows the loop": turns(stores_and_tells, after=signals_at_the_end),
}


@pytest.mark.parametrize("name", BESIDE)
def test_stores_are_made_beside(name: str):
    made = lowered(BESIDE[name], MACHINE, 2)
    assert HANDED in made.notes and STORE in role_schedule.plan(made.kernels[0].func).roles


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_depends_keeps_its_order(name: str):
    made = lowered(IN_ORDER[name], MACHINE, 2)
    assert HANDED not in made.notes and STORE not in role_schedule.plan(made.kernels[0].func).roles


def test_signals_that_are_not_handed_over_are_kept_back_until_the_next_turn():
    func = IN_ORDER["what there is counts"]
    assert "compute -> next iteration: out; 1 stage, 1 kept signal" in lowered(func, MACHINE, 2).notes
    text = bodies(source(func))
    (kept,) = set(re.findall(r"(kept\d) = tilescale::address\(", text))
    assert text.count(f"tilescale::release<0, int>({kept}, 1)") == 2, "in the next turn, and after the last"


# -- roles that alternate in any order
# -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_by_turns")
@pytest.mark.parametrize(("ranks", "tiles", "blocks"), [(1, 6, 1), (2, 5, 2), (2, 3, 1)])
def test_who_is_told_finds_the_tile(ranks: int, tiles: int, blocks: int, monkeypatch: pytest.MonkeyPatch):
    """In any order of roles and blocks: each signal comes when its tile is in memory, and once."""
    shape, high = (TINY[0] * tiles, TINY[1], TINY[2]), TINY[0]
    (kernel,) = lowered(turn_programs.counted(ranks, shape, blocks, TINY), MACHINE, ranks).kernels
    generator = np.random.default_rng(tiles)
    given = [[generator.integers(-1, 2, (n, TINY[2])).astype("bfloat16") for n in shape[:2]] for _ in range(ranks)]
    tensors = [[*pair, np.full(shape[:2], 99, "bfloat16")] for pair in given]
    wanted = [(a.astype("float32") @ b.astype("float32").T) for a, b in given]
    told: list[tuple[int, int]] = []

    def signal(warps: Any, args: list[Any]) -> None:
        at = int(args[1])
        rows = slice(at * high, at * high + high)
        assert (tensors[warps.rank][2][rows].astype("float32") == wanted[warps.rank][rows]).all()
        told.append((warps.rank, at))

    monkeypatch.setitem(lowered_ranks.FUNCTIONS, "signal", signal)
    interleaved(kernel, tensors, blocks, seed=tiles, calls=1)
    assert sorted(told) == [(rank, at) for rank in range(ranks) for at in range(0, tiles, 2)]
    assert all((mine[2].astype("float32") == want).all() for mine, want in zip(tensors, wanted, strict=True))
