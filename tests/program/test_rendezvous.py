# SPDX-License-Identifier: MIT
"""Rendezvous that calls of programs need, and the reasons."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale.language as T
from tests.cuda.support import example_programs
from tests.program.support import H200, taken_apart
from tilescale.hda.current import use_machine
from tilescale.program.rendezvous_need import needs_rendezvous_at_entry, needs_rendezvous_at_exit

ENTRY_WHY = {False: "devices synchronize before", True: "before the two have synchronized", None: "no device accesses"}
EXIT_WHY = {False: "devices synchronize after", True: "after the call has ended there", None: "no device accesses"}
WAITED = "each device waits for the signals"

EXAMPLES: dict[str, dict[str, tuple[bool | None, bool | None | str]]] = {
    "01_neighbour_shift": {"neighbour_shift": (False, False)},
    "02_put_with_signal": {"put_with_signal": (False, False)},
    "03_all_gather": {"all_gather": (False, None), "push": (False, False)},
    "04_all_reduce": {
        "allreduce": (False, None), "one_shot_allreduce": (False, True), "two_shot_allreduce": (False, True),
    },
    "05_all_to_all": {"all_to_all": (False, None), "exchange": (False, True)},
    "06_ag_gemm": {"ag_then_gemm": (False, None), "ag_gemm": (False, True)},
    "07_gemm_rs": {"gemm_then_rs": (False, None), "gemm_rs": (False, True)},
    "08_tp_gemm": {"tensor_parallel_gemm": (False, None)},
    "09_cp_flash_mla": {"cp_flash_mla": (False, None)},
    "10_cluster_gemm": {"by_clusters": (None, None)},
    "11_roles": {"roles": (True, True)},
    "12_sender_role": {"gemm_and_send": (False, False)},
    "13_ring_attention": {"attention_on_a_ring": (False, False)},
    "14_ulysses_attention": {"ulysses_attention": (False, None)},
    "15_gemm_all_reduce": {"gemm_then_ar": (False, None), "gemm_ar": (False, True)},
    "16_cannon": {"cannon_gemm": (False, True)},
    "17_summa": {"summa": (True, False), "srumma": (False, False)},
    "18_moe": {"moe_layer": (False, True)},
    "22_ag_gemm_overlapped": {"ag_gemm": (True, WAITED)},
    "23_gemm_rs_overlapped": {"gemm_rs": (True, WAITED)},
    "24_grouped_experts": {"experts": (False, None), "gathered_experts": (False, None)},
}  # fmt: skip
"""Whether programs need one at the entry and at the exit; None: no synchronization is needed."""


def test_every_example_is_in_the_table():
    assert EXAMPLES.keys() == example_programs().keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str):
    with use_machine("h200-sxm-8"):
        programs = {p.name: p for p in map(taken_apart, example_programs()[name]())}
    assert programs.keys() == EXAMPLES[name].keys()
    for each, (entry, leaving) in EXAMPLES[name].items():
        begin, end = (need(programs[each], H200) for need in (needs_rendezvous_at_entry, needs_rendezvous_at_exit))
        assert begin.needed is bool(entry) and ENTRY_WHY[entry] in begin.why
        assert end.needed is (leaving is True)
        assert (leaving if leaving == WAITED else EXIT_WHY[leaving]) in end.why


def rendezvous(func: Any) -> tuple[bool, bool]:
    """Whether a call needs a rendezvous at its entry and exit."""
    program = taken_apart(func)
    entry, leaving = needs_rendezvous_at_entry(program, H200), needs_rendezvous_at_exit(program, H200)
    assert entry.why and leaving.why
    return entry.needed, leaving.needed


def test_a_program_of_devices_that_do_not_reach_each_other_needs_none():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64) as bx:
            X[bx] = 1.0
            T.signal(F[0])
            with T.Scale("device"):
                T.allreduce(X)

    assert rendezvous(f) == (False, False)


@pytest.mark.parametrize(
    ("first", "last", "needed"),
    [(True, True, (False, False)), (True, False, (False, True)), (False, True, (True, False))],
)
def test_barriers_of_the_program_do_it_too(first: bool, last: bool, needed: tuple[bool, bool]):
    @T.prim_func
    def f(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=2, threads=64) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((32,), "float32")
                T.clear(tile)
                if first:
                    T.barrier()
                for _ in T.serial(3):
                    T.copy(tile, X[bx * 32], dst=1 - rank)
                if last:
                    T.barrier()

    assert rendezvous(f) == needed


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        ("all", False),
        ("of parts", False),
        ("too few", True),
        ("one block", True),
        ("some blocks", True),
        ("another index", True),
        ("not at all", True),
        ("in a loop", False),
        ("get", True),
    ],
)
def test_signals_that_are_all_waited_for_need_no_rendezvous_at_the_exit(case: str, needed: bool):
    @T.prim_func
    def f(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            F = T.alloc_flags((4,))
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((1, 64), "float32")
                T.clear(tile)
                if case == "in a loop":
                    for _ in T.serial(3):
                        T.copy(tile, X[bx, 0], dst=1 - rank, signal=F[bx])
                else:
                    T.copy(tile, X[bx, 0], dst=1 - rank, signal=F[bx if case == "of parts" else 0])
                if case in ("all", "too few"):
                    T.wait(F[0], ">=", 4 if case == "all" else 3)
                if case == "of parts":
                    T.wait(F[bx], ">", 0)
                if case == "one block":
                    if bx == 0:
                        T.wait(F[0], ">=", 1)
                if case == "some blocks":
                    if bx < 2:
                        T.wait(F[bx], ">=", 4)
                    T.signal(F[3], dst=1 - rank)
                if case == "another index":
                    T.wait(F[1], ">=", 0)
                if case == "in a loop":
                    T.wait(F[bx], ">=", 3)
                if case == "get":
                    T.wait(F[0], ">=", 4)
                    T.copy(X[bx, 0], tile, src=1 - rank)

    assert rendezvous(f) == (True, needed)


@pytest.mark.parametrize(
    ("case", "needed"),
    [("before", False), ("behind", True), ("another device", True), ("other units", True), ("read by nobody", True)],
)
def test_a_signal_speaks_of_copies_before_it_that_its_receiver_looks_at(case: str, needed: bool):
    @T.prim_func
    def f(X: T.Tensor((4, 64), "float32"), L: T.Tensor((4, 64), "float32"), out: T.Tensor((4, 64), "float32")):
        with T.Kernel(device=4, block=4, threads=64) as bx:
            F = T.alloc_flags((4,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((1, 64), "float32")
                got = T.alloc((1, 64), "float32")
                T.clear(tile)
                if case in ("before", "another device", "read by nobody"):
                    T.copy(tile, L[bx, 0], dst=(rank + (2 if case == "another device" else 1)) % size)
                if case == "other units":
                    if bx == 0:
                        T.copy(tile, L[bx, 0], dst=(rank + 1) % size)
                T.copy(tile, X[bx, 0], dst=(rank + 1) % size, signal=F[bx])
                if case == "behind":
                    T.copy(tile, L[bx, 0], dst=(rank + 1) % size)
                T.wait(F[bx], ">=", 1)
                T.copy(X[bx, 0], got)
                if case != "read by nobody":
                    T.copy(L[bx, 0], got)
                T.copy(got, out[bx, 0])

    assert rendezvous(f) == (True, needed)


def test_flags_that_a_caller_passes_may_begin_anywhere():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((64,), "float32")
                T.clear(tile)
                T.copy(tile, X, dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", 1)

    assert rendezvous(f) == (True, True)


@pytest.mark.parametrize(("waits", "needed"), [(True, False), (False, True)])
def test_a_started_gather_is_over_when_all_its_flags_are_waited_for(waits: bool, needed: bool):
    @T.prim_func
    def f(X: T.Tensor((8, 64), "float32"), Y: T.Tensor((16, 64), "float32"), Z: T.Tensor((16, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            F = T.alloc_flags((2, 2))
            with T.Scale("device"):
                T.all_gather(X, Y, signal=F, chunk=4)
            with T.Scale("block"):
                tile = T.alloc((4, 64), "float32")
                if waits:
                    T.wait(F[bx // 2, bx % 2], ">=", 1)
                    T.copy(Y[bx * 4, 0], tile)
                    T.copy(tile, Z[bx * 4, 0])
            with T.Scale("device"):
                T.barrier()

    assert rendezvous(f) == (True, needed), "a barrier does not complete what a copy queue does"


@pytest.mark.parametrize(("rounds", "needed"), [(1, False), (2, True)])
def test_a_gather_that_is_started_again_raises_its_flags_again(rounds: int, needed: bool):
    @T.prim_func
    def f(Y: T.Tensor((16, 64), "float32")):
        with T.Kernel(device=2, block=2, threads=64) as bx:
            F = T.alloc_flags((2, 1))
            with T.Scale("device") as (rank, _):
                for _ in T.serial(rounds):
                    T.all_gather(Y[rank * 8 : rank * 8 + 8, 0:64], Y, signal=F)
            with T.Scale("block"):
                T.wait(F[bx, 0], ">=", 1)

    assert rendezvous(f) == (True, needed)


@pytest.mark.parametrize("case", ["a warpgroup", "both warpgroups", "left early", "also data"])
def test_what_is_not_counted_is_not_known(case: str):
    """Number of signals of a program's parts, in loops that end early too, and other changes of a flag."""

    @T.prim_func
    def f(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(device=2, block=1, threads=256):
            F, G = T.alloc_flags((1,)), T.alloc_flags((1,))
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile, one = T.alloc((1, 64), "float32"), T.alloc((1,), "int32")
                T.clear(tile)
                T.clear(one)
                if case == "both warpgroups":
                    with T.Scale("warpgroup"), T.Scale("device"):
                        T.signal(F[0], dst=1 - rank)
                if case == "a warpgroup":
                    with T.Scale("warpgroup") as (wg, _):
                        if wg == 0:
                            with T.Scale("device"):
                                T.signal(F[0], dst=1 - rank)
                if case == "left early":
                    T.signal(F[0], dst=1 - rank)
                    for _ in T.serial(2):
                        if X[0, 0] > 0:
                            T.loop_break()
                        T.wait(F[0], ">=", 1)
                if case == "also data":
                    T.signal(F[0], dst=1 - rank)
                    T.copy(one, F, dst=1 - rank, signal=G[0])
                    T.wait(G[0], ">=", 1)
                T.wait(F[0], ">=", 1 if case != "left early" else 0)

    assert rendezvous(f) == (True, True)


def test_a_loop_that_is_left_early_may_pass_its_barrier_by():
    @T.prim_func
    def f(X: T.Tensor((1, 64), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((1, 64), "float32")
                T.clear(tile)
                for _ in T.serial(2):
                    T.copy(tile, X, dst=1 - rank)
                    if X[0, 0] > 0:
                        T.loop_break()
                    T.barrier()

    assert rendezvous(f) == (True, True)


@pytest.mark.parametrize("blocks", ["one", "as many as there are rows"])
def test_a_grid_that_may_have_no_block_is_no_barrier(blocks: str):
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=1 if blocks == "one" else n, threads=64):
            with T.Scale("device") as (rank, size):
                T.copy(X, X, dst=(rank + 1) % size)
            with T.Scale("block"), T.Scale("device"):
                T.barrier()

    assert rendezvous(f) == (True, blocks != "one")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_flags_are_enough_from_the_last_signal_on(blocks: int, turns: int, waited: int):
    @T.prim_func
    def f(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(device=2, block=blocks, threads=64) as bx:
            F = T.alloc_flags((1,))
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((1, 64), "float32")
                T.clear(tile)
                for _ in T.serial(turns):
                    T.copy(tile, X[bx, 0], dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", waited)

    assert rendezvous(f) == (True, waited < blocks * turns)
