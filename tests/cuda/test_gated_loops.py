# SPDX-License-Identifier: MIT
"""Pipelined loops of warpgroups that wait for their operands: positions of the waits, and declined loops."""

import re
from functools import cache
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda import gated_programs
from tests.cuda.gated_programs import COLUMNS, ROWS, STEP, VARIANTS, arriving
from tests.cuda.support import bodies, lowered, notes, role_graph, source
from tests.cuda.test_pipelines import branches
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel

GATE = re.compile(
    r"tilescale::wait_by_producer<|released\[0\]\.wait|[XYB]_(?:peers_)?desc, full|empty\[[^.]*\.wait|arrive"
)


@cache
def variant(name: str) -> Any:
    """A variant of two devices, traced once for all its tests."""
    return arriving(devices=2, **VARIANTS[name])


def loops(func: Any) -> list[str]:
    """Remarks on a program's loops."""
    return [note for note in notes(func) if note.startswith("T.Pipelined")]


def text(func: Any) -> str:
    """The first kernel of a program."""
    return bodies(source(func)).split('extern "C"')[1]


# -- waits
# ---------------------------------------------------------------------------------------------------------------


def waits_of_units(name: str) -> bool:
    """Whether the program waits in front of its loop, whose trip count is an argument."""
    return "in front" in name and "turns" not in name


def gates(name: str) -> int:
    """Number of waits of the loader."""
    return 0 if name in ("in front", "pulled, in front", "pulled, at once") else 1


def released(name: str) -> bool:
    """Whether units signal that they have reached the loop: they have waited, or written tiles to be loaded."""
    return waits_of_units(name) or "pulled" in name and "once" not in name


OF_TWO_KINDS = ("each step and in front", "turns, in front") + tuple(
    f"pulled, {kind}" for kind in ("between loads", "turns", "one stage", "in front")
)
"""Variants that combine two others: their graphs are checked daily, their texts at night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in OF_TWO_KINDS)) for name in VARIANTS]
)
def test_the_loader_waits_in_front_of_what_a_wait_orders(name: str):
    """B, which is not sent, is loaded before; units wait for tiles only."""
    loader, units = branches(text(variant(name)))
    order = [found.split("::")[-1].split("[")[0].split("<")[0] for found in GATE.findall(loader)]
    source = "X_peers" if "once" in name else "Y_peers" if "pulled" in name else "Y"
    first, waits = ["released"] * released(name), ["wait_by_producer"] * gates(name)
    assert order == [*first, "empty", "B_desc, full", *waits, "arrive", f"{source}_desc, full"]
    assert units.count("tilescale::wait<") == waits_of_units(name)
    assert f"warpgroup_reg_dealloc<{40 if waits else 24}>" in loader


@pytest.mark.parametrize("name", VARIANTS)
def test_the_graph_says_who_waits(name: str):
    func, stages = variant(name), VARIANTS[name].get("stages", 3)
    loads = f"load (128 threads, {40 if gates(name) else 24} registers)"
    said = [f"{stages} stage{'s' * (stages > 1)}", *["1 T.wait by load"] * gates(name)]
    said += ["once compute comes to the loop"] * released(name)
    roles, channel = role_graph(func)
    assert roles.endswith(loads) and channel == f"load -> compute: b, a; {', '.join(said)}"
    assert any("src=): tma (by the producer, ahead of its use)" in n for n in notes(func)) == ("pulled" in name)


def test_units_that_may_load_their_own_say_so_once_they_have_written_it():
    """Only the loader waits for data that a device reads of itself."""

    @T.prim_func
    def everywhere(
        X: T.Tensor((ROWS, STEP), "bfloat16"),
        Y: T.Tensor((ROWS, STEP), "bfloat16"),
        B: T.Tensor((STEP, COLUMNS), "bfloat16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
        flags: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"), T.Scale("device") as (d, n):
                a = T.alloc((ROWS, STEP), "bfloat16", level="l1")
                b = T.alloc((STEP, COLUMNS), "bfloat16", level="l1")
                c = T.alloc((ROWS, COLUMNS), "float32", level="l0")
                own = T.alloc((ROWS, STEP), "bfloat16", level="l1")
                T.copy(X, own)
                T.copy(own, Y)
                T.signal(flags[d], dst=(d + 1) % n)
                for step in T.Pipelined(2, num_stages=2):
                    if step > 0:
                        T.wait(flags[(d + step) % n], ">=", 1)
                    T.copy(Y, a, src=(d + step) % n)
                    T.copy(B, b)
                    with T.Scale("warpgroup"):
                        columns, rows = T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow)
                        T.gemm(columns, rows, T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C)

    loader, units = branches(text(everywhere))
    assert loader.index("released[0].wait") < loader.index("Y_peers_desc, full")
    assert units.index("complete_stores") < units.index("tilescale::signal<") < units.index("released[0].arrive")


def test_nothing_is_loaded_from_a_peer_that_has_not_come():
    """Threads of a small grid wait for peers at its start, except where a producer, which does not, loads."""
    kernel = text(variant("pulled, at once"))
    assert "X_peers_desc, full" in branches(kernel)[0] and "tilescale::enter" not in kernel
    assert lowered(variant("pulled, at once")).lowered.rendezvous.entry


def test_a_wait_in_front_is_one_of_the_first_iteration():
    loader, _ = branches(text(variant("turns, in front")))
    assert re.search(r"if \(step == 0\) \{\s*tilescale::wait_by_producer<", loader)


def test_units_say_that_they_reach_the_loop_once_they_have_waited():
    _, units = branches(text(variant("in front")))
    wait, *arrivals = (m.start() for m in re.finditer(r"tilescale::wait<|released\[0\]\.arrive", units))
    assert len(arrivals) == 2 and wait < arrivals[0]
    assert re.findall(r"(\S+)\s+released\[0\]\.arrive", units) == ["tilescale::acquired();"] * 2


def test_rings_go_on_from_turn_to_turn():
    """Four steps on three stages: the second turn begins with the second place, in the second round."""
    loader, units = branches(text(arriving(devices=2, turns=2, steps=4)))
    done = r"\(\((turn\w*) \* 4\) \+ (step\w*)\)"
    place, parity = rf"\[\({done} % 3\)\]", rf"\(\({done} % 6\) / 3\)"
    assert len(re.findall(rf"empty{place}\.wait\(\(1 - {parity}\)\);", loader)) == 1
    assert len(re.findall(rf"full{place}\.wait\({parity}\);", units)) == 2


def test_a_loader_beside_a_grid_that_synchronizes_devices_by_itself():
    """Only the user's threads do so; a loader that waits has a barrier in front of its kernel."""

    @T.prim_func
    def sent(
        Y: T.Tensor((ROWS, 4 * STEP), "bfloat16"),
        B: T.Tensor((4 * STEP, COLUMNS), "bfloat16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
        flags: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"), T.Scale("device") as (d, n):
                a = T.alloc((ROWS, STEP), "bfloat16", level="l1")
                b = T.alloc((STEP, COLUMNS), "bfloat16", level="l1")
                c = T.alloc((ROWS, COLUMNS), "float32", level="l0")
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                for step in T.Pipelined(4, num_stages=2):
                    T.copy(Y[0, step * STEP], a)
                    T.copy(B[step * STEP, 0], b)
                    with T.Scale("warpgroup"):
                        columns, rows = T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow)
                        T.gemm(columns, rows, T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C)
                T.signal(flags[0], dst=(d + 1) % n)

    loader, units = branches(text(sent))
    assert "tilescale::" not in loader and "tma_load" not in units
    order = re.findall(r"tilescale::(come|enter|signal|leave|count)\b", units)
    assert order[:2] == ["come", "enter"] and order[-1] in ("leave", "count")
    assert "tilescale::come" not in text(variant("each step"))


def test_a_wait_of_the_loader_comes_after_what_orders_its_flag():
    """B is not ordered. But before the barrier a flag may be one of an earlier round."""

    @T.prim_func
    def run(
        B: T.Tensor((4 * STEP, COLUMNS), "bfloat16"),
        C: T.Tensor((COLUMNS, COLUMNS), "float32"),
        flags: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"), T.Scale("device") as (d, n):
                b = T.alloc((STEP, COLUMNS), "bfloat16", level="l1")
                c = T.alloc((COLUMNS, COLUMNS), "float32", level="l0")
                T.signal(flags[0], dst=(d + 1) % n)
                T.barrier()
                for step in T.Pipelined(4, num_stages=2):
                    T.wait(flags[step], ">=", 1)
                    T.copy(B[step * STEP, 0], b)
                    with T.Scale("warpgroup"):
                        T.gemm(
                            T.view(b, layout=T.FullRow), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica), True
                        )
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C)

    (channel,) = role_graph(run)[1:]
    assert channel == "load -> compute: b; 2 stages, 1 T.wait by load, once compute comes to the loop"


# -- what the text means -----------------------------------------------------------------------------------------------


def without_waits(kernel: LoweredKernel) -> Any:
    """The plain TileLang function that a kernel is, where all that it waits for has happened."""

    def enter(node: Any) -> Any:
        return tir.sequence([]) if tir.is_extern(getattr(node, "value", None)) else None

    return kernel.func.with_body(tir.rewrite(kernel.func.body, enter=enter))


@pytest.mark.parametrize(("name", "count"), [*((name, 6) for name in VARIANTS), ("each step", 0), ("in front", 4)])
def test_the_text_means_the_program(name: str, count: int):
    how = VARIANTS[name]
    (kernel,) = lowered(arriving(devices=1, **{**how, "sends": False}), devices=1).kernels
    y, b = gated_programs.operands(3, 0, **how)
    c, flags = torch.full((len(y), COLUMNS), torch.nan), torch.ones((how.get("turns", 1), 6), dtype=torch.int32)
    given = [y, y, b, c, flags, count, 1]

    def value(argument: Any, buffer: ir.Buffer | None) -> Any:
        if isinstance(argument, arg.CallerArgument):
            return given[argument.position]
        if isinstance(argument, arg.PeerInstances):
            return given[argument.position][None].clone()
        return 0 if buffer is None else torch.zeros(ir.constants(buffer.shape), dtype=torch.int64)

    parameters = zip(kernel.arguments, ir.parameters(kernel.func), strict=True)
    values = [value(argument, buffer) for argument, (_, buffer) in parameters]
    tilescale.emulate(without_waits(kernel), values, time=False)
    wanted = gated_programs.product(3, 0, 1, count, **how)
    torch.testing.assert_close(c.double(), wanted, rtol=1e-3, atol=1e-3)


# -- what has no loader ------------------------------------------------------------------------------------------------


def declined(kind: str) -> Any:
    """A GEMM with a wait for its tiles that a producer cannot take over."""

    @T.prim_func
    def run(
        Y: T.Tensor((ROWS, 4 * STEP), "bfloat16"),
        B: T.Tensor((4 * STEP, COLUMNS), "bfloat16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
        flags: T.Tensor((8,), "int32"),
        count: T.int32,
    ):
        with T.Kernel(device=2, block=2, threads=256) as bx:
            with T.Scale("block"), T.Scale("device") as (d, n):
                a = T.alloc((ROWS, STEP), "bfloat16", level="l1")
                b = T.alloc((STEP, COLUMNS), "bfloat16", level="l1")
                c = T.alloc((ROWS, COLUMNS), "float32", level="l0")
                for turn in T.serial(2):
                    if kind == "condition" and bx > turn:
                        T.signal(flags[7], dst=(d + 1) % n)
                    if kind == "barrier":
                        T.barrier()
                    for step in T.Pipelined(turn + 1 if kind == "length" else count, num_stages=2):
                        if kind in ("set", "length", "leave"):
                            T.wait(flags[step], ">=", 1)
                        if kind == "exactly":
                            T.wait(flags[step], "==", 1)
                        T.copy(Y[0, step * STEP], a)
                        T.copy(B[step * STEP, 0], b)
                        with T.Scale("warpgroup") as (wg, _):
                            if kind == "by units":
                                T.wait(flags[step], ">=", 1)
                            columns, rows = T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow)
                            T.gemm(columns, rows, T.view(c, layout=T.Replica))
                        if kind == "behind":
                            T.wait(flags[step], ">=", 1)
                    if kind == "leave" and bx == 1:
                        T.loop_break()
                    if kind == "set":
                        T.signal(flags[0], 0, op="set")
                    if kind == "exactly":
                        T.signal(flags[1], 1, dst=(d + 1) % n)
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C)
                T.copy(a, Y[0, 0], dst=(d + 1) % n, signal=flags[6])

    return run


@pytest.mark.parametrize(
    ("impl", "writes", "reason"),
    [
        ("lsu", False, r"a copy in it is none in bulk \(line \d+\)"),
        (None, True, "the program writes the source of its loads"),
    ],
)
def test_other_loads_from_peers_keep_a_loop_in_order(impl: str | None, writes: bool, reason: str):
    @T.prim_func
    def run(
        X: T.Tensor((ROWS, STEP), "bfloat16"),
        B: T.Tensor((STEP, COLUMNS), "bfloat16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"), T.Scale("device") as (d, n):
                a = T.alloc((ROWS, STEP), "bfloat16", level="l1")
                b = T.alloc((STEP, COLUMNS), "bfloat16", level="l1")
                c = T.alloc((ROWS, COLUMNS), "float32", level="l0")
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                for step in T.Pipelined(4, num_stages=2):
                    T.copy(B, b)
                    T.copy(X, a, src=(d + 1) % n, impl=impl)
                    with T.Scale("warpgroup") as (wg, _):
                        columns, rows = T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow)
                        T.gemm(columns, rows, T.view(c, layout=T.Replica))
                        if writes:
                            X[step, wg] = 1
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C)

    (said,) = loops(run)
    assert re.fullmatch(f"T.Pipelined over step without a loader: {reason}", said)


def test_a_loop_that_no_units_work_in_has_its_reason_too():
    @T.prim_func
    def run(X: T.Tensor((512, 64), "float32"), Y: T.Tensor((512, 64), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((64, 64), "float32", level="l1")
            for step in T.Pipelined(8, num_stages=2):
                T.copy(X[step * 64, 0], tile)
                T.copy(tile, Y[step * 64, 0])
            with T.Scale("warpgroup") as (wg, _):
                Y[0, wg] = 0

    (said,) = loops(run)
    assert re.fullmatch(r"T.Pipelined over step without a loader: the program itself works in it \(line \d+\)", said)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("by units", "units wait inside it for its loads"),
        ("behind", "it waits after statements of units"),
        ("set", "the program changes a flag for which it waits in it, and the wait would come too early"),
        ("exactly", "the program changes a flag for which it waits in it, and the wait would come too early"),
        ("length", "its length changes from iteration to iteration of the loop around it"),
        ("barrier", "its trip count may be 0 in an iteration of the enclosing loop, which waits for its loads"),
        ("leave", "the loop around it may be left"),
    ],
)
def test_other_waits_keep_a_loop_in_order(kind: str, reason: str):
    assert loops(declined(kind)) == [f"T.Pipelined over step without a loader: {reason}"]
