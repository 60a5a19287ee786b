# SPDX-License-Identifier: MIT
"""Persistent loops whose warps keep their roles: which have them, and what each role executes."""

import re
from functools import cache
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda import overlap_programs as programs
from tests.cuda.support import bodies, notes, role_graph, source

SMALL = (2048, 512, 512)

KEPT = {
    "gather": cache(lambda: programs.ag_gemm(shape=SMALL, blocks=12, stages=2)),
    "scatter": cache(lambda: programs.rs_gemm(shape=SMALL, blocks=12, stages=2)),
    "straight to the owner": cache(lambda: programs.rs_gemm(shape=SMALL, blocks=12, stages=2, direct=True)),
}


def is_kept(func: Any) -> bool:
    """Whether warps keep their roles in all turns."""
    return any(line.startswith("persistent roles") for line in role_graph(func))


def roles(func: Any) -> list[str]:
    """Statements of the consumer threads, of the producer, and of the storing threads, if there are any."""
    return re.split(r"tl::warpgroup_reg_(?:de)?alloc<", bodies(source(func)))[1:]


@pytest.mark.parametrize("name", KEPT)
def test_roles_stand_around_the_turns(name: str):
    func = KEPT[name]()
    assert is_kept(func)
    for role in roles(func)[:2]:
        outer, inner = re.findall(r"^ *for \(int (?!i)\w+ = 0;", role, re.MULTILINE)[:2]
        assert outer.index("for") < inner.index("for"), "the pipelined loop stands in the other one"
    assert len(roles(func)) == (2 if name == "gather" else 3), "registers are handed over once"


@pytest.mark.parametrize("name", KEPT)
def test_who_loads_does_nothing_else(name: str):
    """Tiles of the loop come by bulk loads of one role; parts that the other reads at its end are its own affair."""
    computes, loads, *stores = roles(KEPT[name]())
    assert loads.count("tl::tma_load(") == 2 and "tl::tma_load(" not in computes
    assert "wgmma" in computes and "wgmma" not in loads
    assert "tl::tma_store(" in [computes, *stores][-1] and "tl::tma_store(" not in loads
    assert "tilescale::signal" not in loads and "tilescale::release" not in loads


def test_waits_of_loads_are_made_by_who_loads():
    computes, loads = roles(KEPT["gather"]())
    assert loads.count("tilescale::wait_by_producer<") == 1 and "tilescale::wait" not in computes
    assert loads.index("tilescale::wait_by_producer<") < loads.index("tl::tma_load(")


@pytest.mark.parametrize(
    ("blocks", "senders", "kept"), [pytest.param(12, 4, True, marks=pytest.mark.nightly), (132, 16, False)]
)
def test_roles_side_by_side_need_room_for_all_tiles(blocks: int, senders: int, kept: bool):
    """One role after the other, the slots of 16 senders reuse the memory of the loop's tiles."""
    func = programs.ag_gemm_senders(shape=(4096, 512, 512), blocks=blocks, senders=senders)
    assert is_kept(func) == kept
    assert "tl::tma_load(" in source(func)  # it fits in both cases


def test_a_grid_of_one_tile_each_has_no_turns():
    assert not is_kept(programs.ag_gemm(shape=SMALL))


def sums_in_turns() -> Any:
    """Persistent programs that wait for no flags; a reduction needs shared memory of its own."""

    @T.prim_func
    def f(A: T.Tensor((512, 512), "bfloat16"), B: T.Tensor((512, 512), "bfloat16"), C: T.Tensor((512,), "float32")):
        with T.Kernel(device=2, block=2, threads=256) as b:
            with T.Scale("block"), T.Scale("device"):
                x = T.alloc((128, 64), "bfloat16", level="l1")
                y = T.alloc((64, 128), "bfloat16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                total = T.alloc((128,), "float32", level="l0")
                for turn in T.serial(2):
                    T.clear(c)
                    for k in T.Pipelined(8, num_stages=2):
                        T.copy(A[(b + 2 * turn) * 128, k * 64], x)
                        T.copy(B[k * 64, 0], y)
                        T.gemm(x, y, c)
                    T.reduce_sum(c, total, dim=1)
                    T.copy(total, C[(b + 2 * turn) * 128])

    return f


def test_where_nothing_is_in_order_nothing_is_said_of_roles_that_stock_has():
    """Its loop gets a producer from stock TileLang, though its roles are not around the iterations."""
    func = sums_in_turns()
    assert not is_kept(func) and not any("without a producer" in note for note in notes(func))
    assert "tl::tma_load(" in source(func)


def taken_in_turns(*, set_back: bool) -> Any:
    """Each iteration waits for a flag, which may be zero again at its end, for the next one."""

    @T.prim_func
    def f(
        A: T.Tensor((512, 512), "bfloat16"),
        B: T.Tensor((512, 128), "bfloat16"),
        C: T.Tensor((512, 128), "bfloat16"),
        arrived: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(device=2, block=2, threads=256) as b, T.Scale("block"):
            x = T.alloc((128, 64), "bfloat16", level="l1")
            y = T.alloc((64, 128), "bfloat16", level="l1")
            c = T.alloc((128, 128), "float32", level="l0")
            with T.Scale("device"):
                for turn in T.serial(2):
                    T.wait(arrived[b], ">=", 1)
                    T.clear(c)
                    for k in T.Pipelined(8, num_stages=2):
                        T.copy(A[(b + 2 * turn) * 128, k * 64], x)
                        T.copy(B[k * 64, 0], y)
                        T.gemm(x, y, c)
                    T.copy(c, C[(b + 2 * turn) * 128, 0])
                    if set_back:
                        T.signal(arrived[b], 0, op="set")

    return f


def test_a_flag_that_a_turn_sets_back_is_not_waited_for_before_it_has():
    assert "tilescale::wait_by_producer<" in source(taken_in_turns(set_back=False))
    func = taken_in_turns(set_back=True)
    assert "tilescale::wait_by_producer<" not in source(func)
    assert any("changes a flag for which it waits" in note for note in notes(func))


def scaled_in_turns(form: str) -> Any:
    """GEMMs whose tiles are scaled by numbers that are loaded at the start of an iteration."""

    @T.prim_func
    def f(
        A: T.Tensor((512, 512), "bfloat16"),
        B: T.Tensor((512, 128), "bfloat16"),
        S: T.Tensor((512,), "float32"),
        C: T.Tensor((512, 128), "bfloat16"),
        arrived: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(device=2, block=2, threads=256) as b, T.Scale("block"):
            x = T.alloc((128, 64), "bfloat16", level="l1")
            y = T.alloc((64, 128), "bfloat16", level="l1")
            c = T.alloc((128, 128), "float32", level="l0")
            scales = T.alloc((128,), "float32", level="l0")
            with T.Scale("device"):
                for turn in T.serial(2):
                    if form == "behind a wait":
                        T.wait(arrived[b], ">=", turn + 1)
                    T.clear(c)
                    if form == "copied":
                        T.copy(S[(b + 2 * turn) * 128], scales)
                    else:
                        for i in T.Parallel(128):
                            scales[i] = S[(b + 2 * turn) * 128 + i]
                    for k in T.Pipelined(8, num_stages=2):
                        T.copy(A[(b + 2 * turn) * 128, k * 64], x)
                        T.copy(B[k * 64, 0], y)
                        T.gemm(x, y, c)
                    for i, j in T.Parallel(128, 128):
                        c[i, j] *= scales[i]
                    T.copy(c, C[(b + 2 * turn) * 128, 0])
                    if form == "written":
                        for i in T.Parallel(128):
                            S[(b + 2 * turn) * 128 + i] = scales[i] + 1
                    T.signal(arrived[b], dst=1 - b)

    return f


@pytest.mark.parametrize("form", ["element by element", "copied"])
def test_who_computes_loads_what_the_end_of_a_turn_needs_before_its_loop(form: str):
    func = scaled_in_turns(form)
    computes, loads = roles(func)[:2]
    assert is_kept(func)
    assert "= S[" in computes[: computes.index("wgmma")] and "= S[" not in computes[computes.index("wgmma") :]
    assert "S[" not in loads


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("behind a wait", "would not move all its loads and waits"),
        ("written", "the enclosing loop writes the source of its loads"),
    ],
)
def test_what_may_change_is_loaded_in_order(form: str, reason: str):
    func = scaled_in_turns(form)
    assert not is_kept(func) and any(reason in note for note in notes(func))
    source(func)
