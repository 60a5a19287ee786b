# SPDX-License-Identifier: MIT
"""Pipelined loops of units with a producer: which loops qualify, their text, and its results."""

import re
from functools import cache
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, role_graph, source
from tests.cuda.test_thread_groups import interpret, kernel
from tests.ladder import NUMBERED, load

M, N, K = 128, 128, 256


@cache
def split_product(*, tile_k=64, stages=3, k=K, after: Any = None, around: Any = None, threads=256) -> Any:
    """Warpgroups split the K tile; `after` follows their sum, `around` is a reason not to load ahead."""

    @T.macro
    def steps(A, B, X, a, b, c):
        for step in T.Pipelined(k // tile_k, num_stages=stages):
            T.copy(A[0, step * tile_k], a)
            T.copy(B[step * tile_k, 0], b)
            with T.Scale("warpgroup"):
                T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
            if around == "source written":
                with T.Scale("warpgroup") as (wg, _):
                    A[0, wg] = 1

    @T.prim_func
    def run(
        A: T.Tensor((M, k), "bfloat16"),
        B: T.Tensor((k, N), "bfloat16"),
        C: T.Tensor((M, N), "float32"),
        X: T.Tensor((M, tile_k), "bfloat16"),
    ):
        with T.Kernel(1, threads=threads):
            a = T.alloc((M, tile_k), "bfloat16", level="l1")
            b = T.alloc((tile_k, N), "bfloat16", level="l1")
            c = T.alloc((M, N), "float32", level="l0")
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.Replica))
            if around == "loop":
                for _ in T.serial(2):
                    steps(A, B, X, a, b, c)
            elif around == "while":
                turn = T.alloc_var("int32", init=0)
                while turn < 2:
                    steps(A, B, X, a, b, c)
                    turn += 1
            else:
                steps(A, B, X, a, b, c)
            if around == "tile used":
                T.copy(a, X)
            with T.Scale("warpgroup"):
                T.allreduce(T.view(c, layout=T.Replica))
            if after is not None:
                after(c)
            T.copy(c, C)

    return run


@T.macro
def doubled(c):
    for i, j in T.Parallel(M, N):
        c[i, j] = c[i, j] * 2


def first_kernel(func: Any) -> str:
    """The text of a program's first kernel."""
    return bodies(source(func)).split('extern "C"')[1]


def branches(text: str) -> tuple[str, str]:
    """Statements of the producer, and of the units."""
    loader, units = re.split(r"\n  } else {\n", text, maxsplit=1)
    return loader[loader.index("if (256 <= ((int)threadIdx.x)) {") :], units


def values(k: int = K, tile_k: int = 64) -> list[torch.Tensor]:
    a, b = torch.randn(M, k).bfloat16(), torch.randn(k, N).bfloat16()
    return [a, b, torch.full((M, N), torch.nan), torch.full((M, tile_k), torch.nan).bfloat16()]


@pytest.mark.parametrize(
    ("stages", "after", "around"), [(1, None, None), (2, doubled, None), (3, None, "loop"), (3, doubled, None)]
)
def test_the_text_means_the_program(stages: int, after: Any, around: Any):
    args = values()
    interpret(split_product(stages=stages, after=after, around=around), args)
    wanted = args[0].double() @ args[1].double() * (2 if after or around else 1)
    torch.testing.assert_close(args[2].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [256, 512])
def test_roles_share_out_the_registers_that_the_block_began_with(threads: int):
    """All threads begin with equal shares, in steps of 8; a request for more than is left waits forever."""
    text = first_kernel(split_product(threads=threads))
    fewer, more = (int(re.search(rf"warpgroup_reg_{which}<(\d+)>", text)[1]) for which in ("dealloc", "alloc"))
    everybody = threads + 128
    assert 128 * fewer + threads * more <= 65536 // everybody // 8 * 8 * everybody


def test_a_loader_issues_bulk_copies_and_units_work_side_by_side():
    text = first_kernel(split_product())
    assert "__launch_bounds__(384, 1)" in text
    loader, units = branches(text)
    assert loader.count("tl::tma_load(") == 2 and "warpgroup_reg_dealloc<24>" in loader
    assert "tma_load" not in units and "warpgroup_reg_alloc<240>" in units and "__syncthreads" not in units
    loops = re.findall(r"for \(int step_\d.*?\.arrive\(\);", units, re.DOTALL)
    assert len(loops) == 2
    for loop in loops:
        assert loop.count("wgmma_ss") == 1 and "sync_thread_partial" not in loop
        assert re.match(r"for [^\n]*\n *full\[\(step_\d % 3\)\]\.wait", loop)


def test_what_comes_after_the_loop_lies_where_its_tiles_were():
    text = first_kernel(split_product())
    offsets = dict(re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);", text))
    assert offsets == {"a": "0", "slots": "0", "b": "49152"}


@pytest.mark.parametrize(("after", "exchanges"), [(None, 1), (doubled, 2)])
def test_a_sum_that_is_only_stored_stays_in_halves(after: Any, exchanges: int):
    _, units = branches(first_kernel(split_product(after=after)))
    stores = [line for line in units.splitlines() if re.match(r" *\*\(float2\*\)\(\(\(float\*\)slots\)", line)]
    assert len(stores) == 2 * exchanges
    assert len(re.findall(r"^ *tilescale::store_whole\(\(float2\*\)\(C \+", units, re.MULTILINE)) == 3 - exchanges


@pytest.mark.parametrize(
    "declined",
    [
        {"around": "while", "said": "it is a loop of one unit, or stands in one that is not serial"},
        {"around": "tile used", "said": "a tile that it loads is used outside it too"},
        {"around": "source written", "said": "the program writes the source of its loads"},
        {"k": 258, "tile_k": 6, "said": "a copy in it is none in bulk (line 27)"},
    ],
    ids=lambda declined: declined["said"],
)
def test_other_loops_are_not_loaded_ahead(declined: dict[str, Any]):
    reason, how = declined.pop("said"), declined
    lowered = kernel(split_product(**how))
    assert "tma_copy" not in lowered.func.script()
    assert [note for note in lowered.notes if "T.Pipelined" in note] == [
        f"T.Pipelined over step without a loader: {reason}"
    ]


def test_a_warpgroup_loads_for_two_that_compute():
    roles = "roles: compute (256 threads, 240 registers), load (128 threads, 24 registers)"
    assert role_graph(split_product()) == [roles, "load -> compute: a, b; 3 stages"]


def test_an_order_of_blocks_holds_for_the_loader_too():
    text = first_kernel(load(NUMBERED[8]).tp_gemm(1, 512, 512, 512))
    assert text.index("rasterization2DRow<") < text.index("if (256 <= ((int)threadIdx.x)) {")


@cache
def attention(**how: Any) -> Any:
    """The MLA example for the keys of one sequence on one device."""
    return load(NUMBERED[9]).cp_mla(1, 1, 64, 256, 64, 64, **how)


def iteration(text: str) -> str:
    """The loop of the first unit."""
    units = branches(text)[1]
    return units[units.index("for (int k_1") : units.index("} else {", units.index("for (int k_1"))]


@pytest.mark.nightly
def test_attention_synchronizes_twice_less_than_it_exchanges():
    """Tiles that are not written in the loop need no barrier; the producer's tiles are handed over by its barriers."""
    text = first_kernel(attention(tile_n=64))
    assert branches(text)[0].count("tl::tma_load(") == 2
    assert iteration(text).count("__sync_thread_partial(15, 256)") == 4


@pytest.mark.nightly
def test_tiles_of_one_stage_are_handed_over_in_parts():
    """Each warpgroup scores its part; the first is given back while the second one's values are still added up."""
    text = first_kernel(attention())
    loader, _ = branches(text)
    assert loader.count("tl::tma_load(") == 4
    assert re.findall(r"(\w+)\[([01])\]\.(?:wait|arrive)", loader) == [
        ("empty", "0"), ("full", "0"), ("empty", "1"), ("full", "1")
    ]  # fmt: skip
    order = re.findall(r"(?:full|empty)\[\d\]|wgmma_[rs]s|wait_wgmma<\d>|warpgroup_wait<\d>", iteration(text))
    scores = ["full[0]", "wgmma_ss", "wgmma_rs", "warpgroup_wait<0>"]
    values = ["full[1]", "wgmma_ss", "wgmma_ss", "wait_wgmma<1>", "empty[0]", "wait_wgmma<0>", "empty[1]"]
    assert order == [*scores, *values]


@pytest.mark.parametrize(
    "how",
    [
        {"tile_n": 64},
        {"exchange": "exchanged"},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"exchange": "exchanged", "tile_n": 128}, marks=pytest.mark.nightly),
    ],
)
def test_attention_means_the_same_in_parts(how: dict[str, Any]):
    if "exchange" in how:
        how = {**how, "exchange": getattr(load(NUMBERED[9]), how["exchange"])}
    q, q_pe, kv, k_pe = (torch.randn(shape).half() for shape in [(1, 64, 64)] * 2 + [(1, 256, 1, 64)] * 2)
    output = torch.full((1, 64, 64), torch.nan)
    interpret(attention(**how), [q, q_pe, kv, k_pe, output])
    both = torch.cat([q, q_pe], -1).double(), torch.cat([kv, k_pe], -1)[:, :, 0].double()
    weights = (both[0] @ both[1].mT / 128**0.5).softmax(-1)
    torch.testing.assert_close(output.double(), weights @ kv[:, :, 0].double(), rtol=2e-3, atol=2e-3)


@pytest.mark.nightly
def test_attention_fits():
    """With a merge of splits; that the example's programs do, which have none, is seen where they are compiled."""
    module = load(NUMBERED[9])
    assert source(module.cp_mla(2, 1, 64, 1024, module.DIM, module.PE_DIM, splits=2))


def in_clusters(*, meets_before: bool) -> Any:
    """Two blocks of a cluster each have half of the GEMM's K; each gets the sum of half of the rows."""

    @T.prim_func
    def run(
        A: T.Tensor((M, 2 * K), "bfloat16"),
        B: T.Tensor((2 * K, N), "bfloat16"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(cta_cluster=2, block=2, threads=256) as part, T.Scale("block"):
            a = T.alloc((M, 64), "bfloat16", level="l1")
            b = T.alloc((64, N), "bfloat16", level="l1")
            c = T.alloc((M, N), "float32", level="l0")
            sums, share = (T.alloc((rows, N), "float32", level="l1") for rows in (M, M // 2))
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.Replica))
            if meets_before:
                T.barrier()
            for step in T.Pipelined(K // 64, num_stages=3):
                T.copy(A[0, part * K + step * 64], a)
                T.copy(B[part * K + step * 64, 0], b)
                with T.Scale("warpgroup"):
                    T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
            with T.Scale("warpgroup"):
                T.allreduce(T.view(c, layout=T.Replica))
            T.copy(c, sums)
            T.reduce_scatter(sums, share)
            T.copy(share, C[part * (M // 2), 0])

    return run


def test_a_loader_runs_beside_a_cluster_that_meets_behind_its_loop():
    """All threads of a cluster come to its barriers: loaders have ended by then, or there is none."""
    assert role_graph(in_clusters(meets_before=False))[1:] == ["load -> compute: a, b; 3 stages"]
    assert not role_graph(in_clusters(meets_before=True))
    text = first_kernel(in_clusters(meets_before=False))
    loader, units = branches(text)
    assert "cluster_barrier" not in loader and units.count("cluster_barrier") == 2
    # The loader waits for the grid before, too.
    assert text.index("cudaGridDependencySynchronize();") < text.index("if (256 <= ((int)threadIdx.x)) {")


def test_a_split_product_of_a_cluster_is_the_product():
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=rng).bfloat16() for shape in [(M, 2 * K), (2 * K, N)])
    c = torch.full((M, N), torch.nan)
    tilescale.emulate(in_clusters(meets_before=False), [a, b, c])
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("waits", "written", "channel"),
    [
        ("before", "A", "b, a; 3 stages, 1 T.wait by load"),
        ("before", "X", "a, b; 3 stages"),
        ("behind", "A", "a, b; 3 stages"),
    ],
)
def test_a_loader_makes_waits_in_front_of_a_loop_for_what_it_loads(waits: str, written: str, channel: str):
    @T.prim_func
    def run(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((M, N), "float32"),
        X: T.Tensor((M, K), "bfloat16"),
        F: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=1, block=1, threads=256):
            a = T.alloc((M, 64), "bfloat16", level="l1")
            b = T.alloc((64, N), "bfloat16", level="l1")
            c = T.alloc((M, N), "float32", level="l0")
            with T.Scale("device"):
                T.clear(A if written == "A" else X)
            with T.Scale("block"):
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                if waits == "before":
                    T.wait(F[0], ">=", 1)
                for step in T.Pipelined(K // 64, num_stages=3):
                    T.copy(A[0, step * 64], a)
                    T.copy(B[step * 64, 0], b)
                    with T.Scale("warpgroup"):
                        T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                if waits == "behind":
                    T.wait(F[0], ">=", 1)
                T.copy(c, C)

    assert role_graph(run)[1:] == [f"load -> compute: {channel}"]
    loads, works = branches(first_kernel(run))
    assert ("tilescale::wait_by_producer<" in loads) == ("T.wait" in channel) == ("tilescale::wait<" not in works)
