# SPDX-License-Identifier: MIT
"""Collectives that end turns of a persistent loop: a warpgroup makes them while the others compute the next tile."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent, greenlet

import tilescale
import tilescale.language as T
from tests.cuda import lowered_ranks, turn_programs
from tests.cuda.lowered_ranks import Job, Rank
from tests.cuda.support import bodies, lowered, role_graph, source
from tests.cuda.test_window import FUNCTIONS
from tilelang_core import ir, role_schedule
from tilelang_core.tiles import Fill, Gemm
from tilescale.backends.tilelang.lowering.role_graph.graph import COMMUNICATE

MACHINE = "h200-sxm-8"
SHAPE = (1024, 2048, 256)
TINY = (64, 16, 16)
"""A tile that is quickly computed element by element."""


# -- execution by roles
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sums", "parts"])
def test_a_warpgroup_makes_the_collective_and_nothing_else(name: str):
    func = turn_programs.PROGRAMS[name](2, SHAPE, 12)
    assert role_graph(func) == [
        "persistent roles: compute (256 threads, 192 registers), load (128 threads, 24 registers), "
        "communicate (128 threads, 96 registers)",
        "load -> compute: a, b; 2 stages",
        "compute -> communicate: out; 1 stage",
    ]
    text = bodies(source(func))
    computes, loads, exchanges = re.split(r"tl::warpgroup_reg_(?:de)?alloc<\d+>", text)[1:]
    assert "wgmma" in computes and not re.search(r"tilescale::(?!wgmma_)|tma_", computes)
    assert loads.count("tl::tma_load(") == 2 and "wgmma" not in loads and "tilescale::" not in loads
    assert exchanges.count("tilescale::barrier(") == 1 and "tl::tma_store(" in exchanges and "wgmma" not in exchanges
    assert computes.count("results_full[0].arrive") == exchanges.count("results_full[0].wait") == 1
    assert computes.count("results_empty[0].wait") == exchanges.count("results_empty[0].arrive") == 1


def test_products_have_instructions_that_fit_into_the_registers_of_four_warpgroups():
    @T.prim_func
    def wide(
        A: T.Tensor((256, 64), "bfloat16"), B: T.Tensor((256, 64), "bfloat16"), C: T.Tensor((256, 256), "bfloat16")
    ):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"), T.Scale("device"):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                b = T.alloc((256, 64), "bfloat16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                out = T.alloc((128, 256), "bfloat16", level="l1")
                for turn in T.serial(2):
                    T.clear(c)
                    for k in T.Pipelined(1, num_stages=2):
                        T.copy(A[turn * 128, k * 64], a)
                        T.copy(B[0, k * 64], b)
                        T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(c, out)
                    T.allreduce(out)
                    T.copy(out, C[turn * 128, 0])

    text = source(wide)
    assert "results_full" in text and "kFloat32, 64, 128, 16" in text


# -- what keeps its order ----------------------------------------------------------------------------------------------


def turns(ends: Callable[..., None], *, times: int = 1, after: Callable[..., None] | None = None) -> Any:
    """A GEMM in a loop whose iterations end with given statements."""

    @T.prim_func
    def f(
        A: T.Tensor((1024, 256), "bfloat16"),
        B: T.Tensor((256, 256), "bfloat16"),
        C: T.Tensor((1024, 256), "bfloat16"),
        flags: T.Tensor((8,), "int32"),
    ):
        with T.Kernel(device=2, block=2, threads=256) as block:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                a = T.alloc((128, 64), "bfloat16", level="l1")
                b = T.alloc((256, 64), "bfloat16", level="l1")
                c = T.alloc((128, 256), "float32", level="l0")
                out = T.alloc((128, 256), "bfloat16", level="l1")
                for _again in T.serial(times):
                    for turn in T.serial(4):
                        T.clear(c)
                        for k in T.Pipelined(4, num_stages=2):
                            T.copy(A[(block + turn * 2) * 128, k * 64], a)
                            T.copy(B[0, k * 64], b)
                            T.gemm(a, b, c, transpose_B=True)
                        ends(C, flags, c, out, (block + turn * 2) * 128, rank)
                if after is not None:
                    after(out, flags)

    return f


@T.macro
def adds_to_what_there_is(C, flags, c, out, row, rank):
    for i, j in T.Parallel(128, 256):
        c[i, j] += C[row + i, j]
    T.copy(c, out)
    T.allreduce(out)
    T.copy(out, C[row, 0])


@T.macro
def signals(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.allreduce(out)
    T.copy(out, C[row, 0])
    T.signal(flags[0], 1, dst=(rank + 1) % 2)


@T.macro
def stores_before(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.copy(out, C[row, 0])
    T.allreduce(out)


@T.macro
def sums_the_accumulator(C, flags, c, out, row, rank):
    T.allreduce(c)
    T.copy(c, out)
    T.copy(out, C[row, 0])


@T.macro
def sums(C, flags, c, out, row, rank):
    T.copy(c, out)
    T.allreduce(out)
    T.copy(out, C[row, 0])


@T.macro
def signals_at_the_end(out, flags):
    T.signal(flags[0], 1)


IN_ORDER = {
    "what there is counts": (turns(adds_to_what_there_is), "write an input of the next tile"),
    "a signal follows": (turns(signals), r"signals or copies to peers follow it \(line \d+\)"),
    "a store comes first": (turns(stores_before), "the computation of the tile writes 'C'"),
    "the accumulator": (turns(sums_the_accumulator), "'c' is used where the next tile is computed, too"),
    "two loops": (turns(sums, times=2), "or its loop is no persistent one"),
    "more follows the loop": (turns(sums, after=signals_at_the_end), "more than scalars stands around the loop"),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_depends_keeps_its_order_and_says_why(name: str):
    func, reason = IN_ORDER[name]
    made = lowered(func, MACHINE, 2)
    (said,) = [note for note in made.notes if "the next tile" in note]
    assert re.search(rf"T\.allreduce \(line \d+\) ends before the next tile is computed: .*{reason}", said)
    assert COMMUNICATE not in role_schedule.plan(made.kernels[0].func).roles


# -- roles that alternate in any order
# -----------------------------------------------------------------------------------


class Warps(Rank):
    """One role of a block: it yields to others at each statement, and where it waits."""

    def __init__(self, job: Job, rank: int, tensors: Any, number: int, role: str, shared: dict[str, Any]):
        super().__init__(job, rank, tensors)
        self.number, self.role, self.plan = number, role, role_schedule.plan(job.kernel.func)
        self.arrays = shared.setdefault("arrays", self.arrays)
        self.filled, self.taken = shared.setdefault("filled", {}), shared.setdefault("taken", {})

    def run(self) -> None:
        self.values |= {var: self.number for var in block_numbers(self.job.kernel.func)}
        self.scope(self.plan.root)

    def scope(self, duties: Any) -> None:
        """Statements of the role in a loop, or in the launch."""
        for step in duties.get(self.role, ()):
            self.until(lambda: True)
            if isinstance(step, tuple):
                self.transfer(*step)
            elif step in self.plan.loops:
                self.loop(self.plan.named[step], self.plan.loops[step])
            else:
                self.stmt(self.plan.named[step])

    def loop(self, loop: ir.For, duties: Any) -> None:
        """A loop in which roles have duties; its scalars are common to all."""
        for turn in range(int(self.expr(loop.extent))):
            self.values[loop.loop_var] = turn
            for stmt in ir.children(loop.body):
                if isinstance(stmt, ir.Bind):
                    self.stmt(stmt)
            self.scope(duties)

    def transfer(self, kind: str, name: str) -> None:
        """Tiles of which there is one instance."""
        if kind == "acquire":
            self.until(lambda: self.filled.get(name, 0) == self.taken.get(name, 0))
        elif kind == "wait":
            self.until(lambda: self.filled.get(name, 0) > self.taken.get(name, 0))
        counts = {"commit": self.filled, "release": self.taken}.get(kind)
        if counts is not None:
            counts[name] = counts.get(name, 0) + 1

    def stmt(self, stmt: ir.Stmt) -> None:
        if isinstance(stmt, ir.BufferStore | ir.Evaluate):
            self.until(lambda: True)
        super().stmt(stmt)

    def call(self, call: Any) -> None:
        name = str(ir.op_name(call))
        if name.endswith(".fill"):
            self.region(Fill.of(call).target)[...] = 0
        elif name.endswith(".gemm"):
            gemm = Gemm.of(call)
            a, b, c = map(self.region, (gemm.a, gemm.b, gemm.c))
            c += a.astype("float32") @ b.astype("float32").T
        else:
            super().call(call)

    def until(self, ready: Callable[[], Any]) -> None:
        """Let others run at least once, then until something holds."""
        getcurrent().parent.switch(ready)


def block_numbers(func: Any) -> list[ir.Var]:
    """The variables that say which block of the grid one is."""
    found: list[ir.Var] = []
    is_index = lambda n: isinstance(n, ir.For) and n.kind == ir.ForKind.THREAD_BINDING  # noqa: E731
    ir.walk(func.body, lambda n: found.append(n.loop_var) if is_index(n) else None)
    return found[:1]


def interleaved(kernel: Any, tensors: list[list[np.ndarray]], blocks: int, seed: int, calls: int) -> None:
    """A kernel on all ranks, all blocks at once, roles and blocks in random order."""
    job, choose = Job(kernel, len(tensors), len(tensors)), random.Random(seed)
    for _ in range(calls):
        running: dict[greenlet, Callable[[], Any]] = {}
        for rank, given in enumerate(tensors):
            for number in range(blocks):
                shared: dict[str, Any] = {}
                for role in role_schedule.plan(kernel.func).roles:
                    warps = Warps(job, rank, given, number, role, shared)
                    running[greenlet(warps.run)] = lambda: True
        while running:
            able = [one for one, ready in running.items() if ready()]
            assert able, "all wait for one another"
            one = choose.choice(able)
            ready = one.switch()
            running.pop(one)
            if not one.dead:
                running[one] = ready


@pytest.fixture
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lowered_ranks, "FUNCTIONS", dict(FUNCTIONS))
    with tilescale.use_machine(MACHINE):
        yield


def run(name: str, ranks: int, tiles: int, blocks: int, seed: int, calls: int = 2) -> bool:
    """Whether a program's results are right."""
    shape = TINY[0] * tiles, TINY[1], TINY[2]
    func = turn_programs.PROGRAMS[name](ranks, shape, blocks, TINY)
    (kernel,) = lowered(func, MACHINE, ranks).kernels
    generator = np.random.default_rng(seed)
    given = [[generator.integers(-1, 2, (n, TINY[2])).astype("bfloat16") for n in shape[:2]] for _ in range(ranks)]
    rows = turn_programs.rows_of_result(name, shape[0], ranks)
    tensors = [[*pair, np.full((rows, shape[1]), 99, "bfloat16")] for pair in given]
    interleaved(kernel, tensors, blocks, seed, calls)
    products = [a.astype("float32") @ b.astype("float32").T for a, b in given]
    wanted = [turn_programs.expected(name, products, rank, TINY[0]) for rank in range(ranks)]
    return all((mine[2].astype("float32") == want).all() for mine, want in zip(tensors, wanted, strict=True))


@pytest.mark.usefixtures("_by_turns")
@pytest.mark.parametrize(
    ("name", "ranks", "tiles", "blocks"),
    [
        ("sums", 2, 5, 2),
        pytest.param("sums", 3, 3, 1, marks=pytest.mark.nightly),
        ("sums in registers", 2, 3, 2),
        ("parts", 2, 3, 2),
        pytest.param("sums", 8, 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_any_order_of_roles_and_blocks_computes_the_same(name: str, ranks: int, tiles: int, blocks: int):
    assert run(name, ranks, tiles, blocks, seed=tiles + ranks, calls=1 if ranks > 3 else 2)


@pytest.mark.usefixtures("_by_turns")
@pytest.mark.parametrize("lost", ["acquire", "wait"])
def test_handing_over_is_needed(lost: str, monkeypatch: pytest.MonkeyPatch):
    kept = Warps.transfer

    def transfer(self: Warps, kind: str, name: str) -> None:
        if (kind, name) != (lost, "results"):
            kept(self, kind, name)

    monkeypatch.setattr(Warps, "transfer", transfer)
    assert not all(run("sums", 2, 3, 1, seed) for seed in range(3))
