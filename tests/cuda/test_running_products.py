# SPDX-License-Identifier: MIT
"""Products that run when a step ends: who loads gets their tiles once they are over."""

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, ptxas, source
from tilescale.backends.cuda.lowering.running_products import given_back_late

EVENTS = (
    (r"tl::warpgroup_commit_batch\(\)", "start()"),
    (r"tl::warpgroup_wait<(\d+)>\(\)", r"finish(\1)"),
    (r"\w+\[(.+)\]\.wait\(.*\)", r"take(\1)"),
    (r"\w+\[(.+)\]\.arrive\(.*\)", r"give(\1)"),
)
"""What the statements of a text are to `Consumer`."""


def product(stages: int, count: Any = 12, running: int = 1, gated: bool = False) -> Any:
    """A tile of A B^T, or of two products."""
    how = {"transpose_B": True, "policy": T.GemmWarpPolicy.FullRow, "annotations": {"wg_wait": running}}
    K = 64 * count if isinstance(count, int) else T.dynamic(count)

    @T.prim_func
    def made(A: T.Tensor((128, K), "float8_e4m3fn"), B: T.Tensor((2, 64, K), "float8_e4m3fn"), C: T.Tensor((128, 64))):
        with T.Kernel(device=1, block=1, threads=256):
            a = T.alloc((128, 64), "float8_e4m3fn", level="l1")
            b = T.alloc((64, 64), "float8_e4m3fn", level="l1")
            up = T.alloc((64, 64), "float8_e4m3fn", level="l1")
            c, d = (T.alloc((128, 64), "float32", level="l0") for _ in range(2))
            T.clear(c)
            T.clear(d)
            for k in T.Pipelined(T.ceildiv(K, 64), num_stages=stages):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, 0, k * 64], b)
                if gated:
                    T.copy(B[1, 0, k * 64], up)
                T.gemm(a, b, c, **how)
                if gated:
                    T.gemm(a, up, d, **how)
            for i, j in T.Parallel(128, 64):
                C[i, j] = c[i, j] + d[i, j]

    return made


def by_warpgroups(stages: int) -> Any:
    """A tile of A B^T; each warpgroup has its own rows of it."""

    @T.prim_func
    def made(A: T.Tensor((128, 512), "bfloat16"), B: T.Tensor((64, 512), "bfloat16"), C: T.Tensor((128, 64))):
        with T.Kernel(device=1, block=1, threads=256):
            a, b = T.alloc((128, 64), "bfloat16", level="l1"), T.alloc((64, 64), "bfloat16", level="l1")
            c = T.alloc((128, 64), "float32", level="l0")
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.FullRow))
            for k in T.Pipelined(8, num_stages=stages):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                with T.Scale("warpgroup"):
                    rows, share = T.view(a, layout=T.FullRow), T.view(c, layout=T.FullRow)
                    T.gemm(rows, b, share, transpose_B=True, annotations={"wg_wait": 1})
            T.copy(c, C)

    return made


def by_clusters(stages: int) -> Any:
    """Two blocks share a tile of A B^T out."""

    @T.prim_func
    def made(A: T.Tensor((256, 512), "bfloat16"), B: T.Tensor((128, 512), "bfloat16"), C: T.Tensor((256, 128))):
        with T.Kernel(cta_cluster=2, block=2, threads=256) as bx, T.Scale("cta_cluster"):
            a, b = T.alloc((256, 64), "bfloat16", level="l1"), T.alloc((128, 64), "bfloat16", level="l1")
            c = T.alloc((256, 128), "float32", level="l0")
            T.clear(c)
            for k in T.Pipelined(8, num_stages=stages):
                with T.Scale("block") as (rank, _):
                    T.copy(A[bx * 128, k * 64], T.view(a, layout=T.FullRow))
                    T.copy(B[rank * 64, k * 64], T.view(b, layout=T.FullRow))
                T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, annotations={"wg_wait": 1})
            T.copy(c, C[bx * 128, 0])

    return made


class Consumer:
    """Who multiplies, as the statements of a text have it: products are over, in order, once they are waited for.

    Barriers are rings of so many places, numbered through where they lie in one array.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.steps = self.over = self.most = 0
        self.started: list[int] = []
        self.given: dict[int, int] = {}

    def take(self, place: int) -> None:
        self.steps += place < self.stages

    def start(self) -> None:
        self.started.append(self.steps)

    def finish(self, running: int) -> None:
        self.most = max(self.most, len(self.started) - self.over)
        self.over = max(self.over, len(self.started) - running)

    def give(self, place: int) -> None:
        ring, slot = divmod(place, self.stages)
        step = self.given[ring] = self.given.get(ring, 0) + 1
        assert slot == (step - 1) % self.stages, "tiles are given back in order"
        assert step not in self.started[self.over :], "nobody reads what is given back"


def consumed(text: str, stages: int, **known: int) -> Consumer:
    """What the first loop of a text that starts products does, with the statements behind it that belong to it."""
    lines = bodies(text).split("\n")
    product = next(number for number, line in enumerate(lines) if "warpgroup_arrive" in line)
    begin = max(number for number, line in enumerate(lines[:product]) if re.match(r" *for \(int k", line))
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    made = list[str]()
    for line in lines[begin:]:
        words, depth = line.strip(), len(line) - len(line.lstrip()) - indent
        if depth < 0 or words.startswith(("#pragma", "} else", "tl::__sync")) and not depth:
            break
        made.append(" " * depth + _spoken(words))
        made += [f"{' ' * depth}  0"] if words.endswith("{") else []
    who = Consumer(stages)
    exec("\n".join(made), {name: getattr(who, name) for name in ("take", "start", "finish", "give")} | known)
    return who


def _spoken(words: str) -> str:
    """A statement of CUDA in Python, as far as it is of interest here."""
    if head := re.fullmatch(r"for \(int (\w+) = 0; \1 < (.+); \+\+\1\) \{", words):
        return f"for {head[1]} in range({head[2]}):"
    if words.endswith("{"):
        return f"if {'1' if words == '{' or 'threadIdx' in words else words[4:-3]}:"
    return next((found.expand(event) for what, event in EVENTS if (found := re.fullmatch(what + ";", words))), "0")


LOOPS: dict[str, Callable[[int], Any]] = {
    "stock": product,
    "unknown length": lambda stages: product(stages, "K"),
    "two products": lambda stages: product(stages, gated=True),
    "warpgroups": by_warpgroups,
    "clusters": by_clusters,
}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("form", LOOPS)
def test_tiles_are_given_back_once_their_products_are_over(form: str, stages: int):
    for K in (0, 1, 64, 65, 512) if form == "unknown length" else (512,):
        who = consumed(source(LOOPS[form](stages)), stages, K=K)
        assert set(who.given.values()) <= {who.steps} and bool(who.given) == bool(K), "all of them, each once"
        assert who.over == len(who.started), "results are complete behind the loop"
        assert who.most == min(who.steps, 2), "a product runs while the next one begins"


@pytest.mark.parametrize("form", LOOPS)
def test_where_all_steps_have_the_same_tiles_products_are_waited_for(form: str):
    text = bodies(source(LOOPS[form](1)))
    assert not re.search(r"warpgroup_wait<[1-9]", text) and "> 0) {" not in text


def test_products_that_are_waited_for_are_left_as_they_are():
    text = source(product(4, running=0))
    assert "warpgroup_wait<0>" in text and given_back_late(text) == text


LOOP = """
  for (int k = 0; k < 8; ++k) {
    full[(k & 3)].wait(((k & 7) >> 2));
    {
      tl::warpgroup_commit_batch();
      tl::warpgroup_wait<1>();
    }
    empty[(k & 3)].arrive();
  }
"""


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("empty[(k & 3)].arrive();", "empty[((k + 3) & 3)].arrive();"),
        ("empty[(k & 3)].arrive();", "n[0] = k;\n    empty[(k & 3)].arrive();"),
        ("empty[(k & 3)].arrive();", "__syncthreads();"),
        ("full[(k & 3)].wait(((k & 7) >> 2));", "tl::cp_async_wait<1>();"),
    ],
    ids=["other tiles", "something else", "nobody to give them back to", "nobody to take them from"],
)
def test_other_loops_wait_for_their_products(what: str, instead: str):
    assert "warpgroup_wait<1>" in given_back_late(LOOP)
    other = LOOP.replace(what, instead)
    assert given_back_late(other) == other.replace("wait<1>();\n    }", "wait<0>();\n    }")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("form", LOOPS)
def test_the_assembler_lets_products_run(form: str):
    said = ptxas(source(LOOPS[form](4)))
    assert "serialized" not in said and "0 bytes spill stores" in said


def test_stock_still_gives_back_what_a_running_product_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilescale.backends.cuda.text.REWRITES", ())
    given = re.search(
        r"warpgroup_wait<1>\(\);\n.*\n +\}\n +mbarrier\[\(\(k_1 & 3\) \+ 4\)\]\.arrive", source(product(4))
    )
    assert given, "mended upstream: tiles need not be given back later"


def test_the_source_of_a_program_says_which_products_run_on():
    kernel = tilescale.compile(product(3), machine="h200-sxm-8")
    assert "T.gemm(a, b, c, transpose_B=True, policy=1, annotations={'wg_wait': 1})" in str(kernel.python)
