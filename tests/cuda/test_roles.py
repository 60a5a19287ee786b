# SPDX-License-Identifier: MIT
"""Statements of the producer of a grid that waits and signals, grids without one, and registers of compiled kernels."""

import re
import shutil
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda import overlap_programs as programs
from tests.cuda import turn_programs
from tests.cuda.support import bodies, notes, ptxas, source
from tests.fuzz.together import joined, renamed

SMALL = (2048, 512, 512)
LATE = "compute -> next iteration: cs; 1 stage"


def told(func: Any) -> list[str]:
    """Remarks on loops and on the ends of their iterations, without registers."""
    return [re.sub(r", \d+ registers", "", note) for note in notes(func) if not note.startswith("T.copy")]


def roles(*channels: str, kind: str = "roles", compute: int = 256) -> list[str]:
    """The graph of threads that compute and a warpgroup that loads, half of which may store."""
    stores = any("-> store" in channel for channel in channels)
    added = "load (64 threads), store (64 threads)" if stores else "load (128 threads)"
    return [f"{kind}: compute ({compute} threads), {added}", *channels]


def kept(*channels: str, compute: int = 256) -> list[str]:
    """The same, around the iterations of a persistent loop."""
    return roles(*channels, kind="persistent roles", compute=compute)


@pytest.mark.parametrize(
    ("func", "said"),
    [
        (lambda: programs.ag_gemm(shape=SMALL), roles("load -> compute: a, b; 4 stages, 1 T.wait by load")),
        (
            lambda: programs.ag_gemm(shape=SMALL, blocks=12, stages=2),
            kept("load -> compute: a, b; 2 stages, 1 T.wait by load", LATE),
        ),
        (lambda: programs.rs_gemm(shape=SMALL), roles("load -> compute: a, b; 4 stages")),
        (
            lambda: programs.rs_gemm(shape=SMALL, blocks=12, stages=2, direct=True),
            kept("load -> compute: a, b; 2 stages", "compute -> store: out; 1 stage"),
        ),
        (lambda: programs.put(rows=1024, columns=1024, blocks=8), ["compute -> peers: x; 3 stages"]),
        (
            lambda: programs.ag_gemm_by_loads(shape=SMALL, waits=True),
            roles("load -> compute: a, b; 4 stages, 1 T.wait by load"),
        ),
        (
            lambda: programs.ag_gemm_by_loads(shape=SMALL, blocks=12, stages=2),
            kept("load -> compute: a, b; 2 stages", LATE),
        ),
        (
            lambda: programs.ag_gemm_by_loads(shape=SMALL, impl="lsu"),
            ["T.Pipelined without a producer: it waits, signals or copies to peers after its first load"],
        ),
        (lambda: programs.put(rows=1024, columns=1024), []),
        (lambda: programs.put(rows=1024, columns=1024, blocks=8, impl="lsu"), []),
    ],
    ids=[
        *("ag", "ag persistent", "rs", "rs persistent", "put"),
        *("loads from peers", "loads from peers, persistent", "loads from peers by threads"),
        *("put of one tile", "put by stores"),
    ],
)
def test_the_graph_says_which_role_does_what(func: Any, said: list[str]):
    assert told(func()) == said


@pytest.mark.parametrize("persistent", [{}, {"blocks": 12, "stages": 2}], ids=["", "persistent"])
def test_loads_from_peers_run_ahead_behind_what_they_wait_for(persistent: dict[str, int]):
    func = programs.ag_gemm_by_loads(shape=SMALL, waits=True, **persistent)
    text = bodies(source(func))
    gate, load = text.index("tilescale::wait_by_producer<"), text.index("tl::tma_load(A_peers_desc")
    assert gate < load and text.count("tma_load(A_peers_desc") == 1
    assert any(note.endswith("src=): tma (by the producer, ahead of its use)") for note in notes(func))


@pytest.mark.parametrize(
    ("func", "when"),
    [
        (lambda: programs.put(rows=1024, columns=1024, blocks=8), "asynchronous, completed before its tile is written"),
        (lambda: programs.rs_gemm(shape=SMALL, direct=True), "synchronous: its signal follows at once"),
        (
            lambda: programs.rs_gemm(shape=SMALL, direct=True, stages=2, blocks=12),
            "asynchronous, completed and signalled by dedicated threads",
        ),
    ],
    ids=["put", "rs", "rs persistent"],
)
def test_notes_say_when_a_copy_to_a_peer_is_complete(func: Any, when: str):
    (said,) = (note for note in notes(func()) if "synchronous" in note)
    assert when in said


def waiting(kind: str) -> Any:
    """A GEMM of tiles that waits, in one of several forms."""

    @T.prim_func
    def product(
        A: T.Tensor((512, 256), "bfloat16"), C: T.Tensor((512, 128), "bfloat16"), flags: T.Tensor((8,), "int32")
    ):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("block"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                b = T.alloc((128, 64), "bfloat16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    T.clear(c)
                    if kind == "signal before":
                        T.signal(flags[0], dst=(rank + 1) % size)
                    if kind in ("before", "outside"):
                        T.wait(flags[bx], ">=", 1)
                    for k in T.Pipelined(4, num_stages=2):
                        if kind == "each turn":
                            T.wait(flags[k], ">=", 1)
                        T.copy(A[bx * 128, k * 64], a)
                        if kind == "between loads":
                            T.wait(flags[k], ">=", 1)
                        T.copy(A[0, k * 64], b)
                        T.gemm(a, b, c, transpose_B=True)
                    if kind == "outside":
                        T.copy(A[0, 0], a)
                    T.copy(c, C[bx * 128, 0])
                    T.signal(flags[7], dst=(rank + 1) % size)

    return product


@pytest.mark.parametrize(
    ("kind", "gates", "said"),
    [
        ("before", 1, "load -> compute: a, b; 2 stages, 1 T.wait by load"),
        ("each turn", 1, "load -> compute: a, b; 2 stages, 1 T.wait by load"),
        ("between loads", 0, "it waits, signals or copies to peers after its first load"),
        ("signal before", 0, "more than waits, scalars and fills stands before it"),
        ("outside", 0, "a tile that it loads is used outside it too"),
    ],
)
def test_waits_go_where_they_are_right(kind: str, gates: int, said: str):
    text, found = bodies(source(waiting(kind))), told(waiting(kind))
    assert text.count("tilescale::wait_by_producer<") == gates
    assert len(found) == 1 + gates and said in found[-1]
    assert ("tl::tma_load(" in text) == ("load ->" in said)


def persistent(loads: str, waits: bool) -> Any:
    """Turns that load `loads` and end with a wait, or with a store to it."""

    @T.prim_func
    def turns(A: T.Tensor((512, 256), "bfloat16"), X: T.Tensor((512, 256), "bfloat16"), flags: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=2, threads=128) as bx:
            with T.Scale("block"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                out = T.alloc((128, 128), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    for turn in T.serial(2):
                        T.clear(c)
                        for k in T.Pipelined(4, num_stages=2):
                            T.copy((X if loads == "X" else A)[(turn * 2 + bx) * 128, k * 64], a)
                            T.gemm(a, a, c, transpose_B=True)
                        T.copy(c, out)
                        T.copy(out, X[0, 0], dst=(rank + 1) % size, signal=flags[turn])
                        if waits:
                            T.wait(flags[turn], ">=", 2)

    return turns


@pytest.mark.parametrize(
    ("loads", "waits", "said"),
    [
        ("A", True, kept("load -> compute: a; 2 stages", compute=128)),
        ("A", False, kept("load -> compute: a; 2 stages", "compute -> store: out; 1 stage", compute=128)),
        ("X", True, ["T.Pipelined without a producer: the enclosing loop writes the source of its loads"]),
    ],
)
def test_a_producer_runs_ahead_of_nothing_that_it_depends_on(loads: str, waits: bool, said: list[str]):
    """A signal before a wait is sent before it: peers may wait for it in the same iteration."""
    func = persistent(loads, waits)
    assert told(func) == said
    text = bodies(source(func))
    assert "tilescale::release<" not in text
    assert ("results_full" in text) == any("-> store" in note for note in said)


@pytest.mark.parametrize("signalled", [True, False])
def test_a_wait_orders_what_is_written_before_its_signal(signalled: bool):
    """A is written after the loop. A flag that the program does not signal may order any write."""

    @T.prim_func
    def turns(A: T.Tensor((512, 256), "bfloat16"), flags: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=2, threads=128) as bx:
            with T.Scale("block"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                c = T.alloc((128, 128), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for turn in T.serial(2):
                        T.clear(c)
                        for k in T.Pipelined(4, num_stages=2):
                            T.copy(A[(turn * 2 + bx) * 128, k * 64], a)
                            T.gemm(a, a, c, transpose_B=True)
                        if signalled:
                            T.signal(flags[turn], dst=(rank + 1) % size)
                        T.wait(flags[turn], ">=", 1)
            with T.Scale("device"):
                T.fill(A, 0)

    late = ["T.Pipelined without a producer: the enclosing loop has a wait that may order its loads"]
    assert told(turns) == (kept("load -> compute: a; 2 stages", compute=128) if signalled else late)


def test_roles_have_the_registers_that_blocks_of_a_processor_begin_with():
    """A warpgroup that asks for more waits for ever."""
    text = bodies(source(turn_programs.sums_in_pairs(2, (2048, 128, 256), 16)))
    (threads, blocks), loads, computes = (
        tuple(map(int, re.findall(r"\d+", re.search(pattern, text)[0])))
        for pattern in (r"bounds__\(\d+, \d+\)", r"reg_dealloc<\d+>", r"reg_alloc<\d+>")
    )
    assert (threads, blocks) == (384, 2)
    begun = 65536 // blocks // threads // 8 * 8 * threads
    assert 128 * loads[0] + 256 * computes[0] <= begun


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nothing_spills():
    made = [
        programs.ag_gemm(shape=SMALL),
        programs.rs_gemm(shape=SMALL),
        programs.ag_gemm_senders(shape=SMALL, blocks=12, senders=4),
        programs.put(rows=1024, columns=1024, blocks=8),
        turn_programs.sums(2, (1024, 2048, 256), 12),
    ]
    text = joined([renamed(source(func), number) for number, func in enumerate(made)])
    assert re.findall(r"(\d+) bytes spill", ptxas(text)) == ["0", "0"] * len(made)
