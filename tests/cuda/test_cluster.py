# SPDX-License-Identifier: MIT
"""The cluster level: distributed shared memory, and clusters that execute as one unit."""

import re
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda import cluster_programs as programs
from tests.cuda.support import bodies, notes, role_graph, source
from tests.gpu.cluster_check import all_checks
from tests.ladder import NUMBERED, load
from tilescale.errors import UnsupportedError
from tilescale.hda.current import use_machine

CHECKS = all_checks(on_gpu=False)

EVERY = {
    "ring": programs.ring(4),
    "all-reduce": programs.allreduce(2, "bfloat16", "sum"),
    "all-reduce of registers": programs.allreduce(4, "int8", "min", "l0"),
    "barrier": programs.skewed(2),
    "collectives": programs.collectives(),
    "product": programs.product(),
    "product by columns": programs.product(split="columns"),
    "product of shares": programs.product(operand="each"),
    "epilogue": programs.epilogue(),
    "products in turn": programs.persistent(),
    "elements": programs.variables(),
    "grid": programs.grid_sum(),
}
"""A program of each kind."""


@pytest.mark.parametrize("name", CHECKS)
def test_what_the_check_on_gpus_expects_is_what_the_emulator_computes(name):
    CHECKS[name](1)


@pytest.mark.parametrize("name", EVERY)
def test_a_cluster_begins_and_ends_together(name):
    """A cluster may be started early; no block accesses memory of a program that has not begun, or has ended."""
    text = bodies(source(EVERY[name]))
    body = text[text.index("{") :]
    begin, barrier = body.index("cudaGridDependencySynchronize();"), body.index("tilescale::cluster_barrier();")
    together = body.find("tl::cluster_sync();")  # where there are barriers that peers arrive at
    touches = [m.start() for m in re.finditer(r"cluster_(put|get|load|store|allreduce)\b|tma_load_multicast", body)]
    loads = [m.start() for m in re.finditer(r"tma_load|\b[A-Z]\[", body)]
    assert begin < min(touches + loads)
    assert 0 < together < min(touches) or begin < barrier < min(touches)
    assert body.rindex("tilescale::cluster_barrier();") > max(touches)


def test_a_branch_of_a_cluster_needs_no_else():
    stored = re.search(r"if \(0 < n\) \{\n.*?tma_store\(", source(programs.conditional()), re.S)
    assert stored is not None and "else" not in stored[0]


def test_tiles_that_peers_touch_share_no_memory_with_others():
    """`put` is written by a program that may be ahead: while this one still uses `early`."""

    @T.prim_func
    def program(X: T.Tensor((8, 256), "float32"), Y: T.Tensor((8, 256), "float32")):
        with T.Kernel(cta_cluster=2, block=8, threads=64) as b:
            with T.Scale("block") as (rank, _):
                early = T.alloc((256,), "float32")
                put = T.alloc((256,), "float32")
                T.copy(X[b, 0], early)
                T.copy(early, Y[b, 0])
                T.copy(early, put, dst=1 - rank)
                T.barrier()
                T.copy(put, Y[b, 0])

    text = bodies(source(program))
    offsets = dict(re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)", text))
    assert abs(int(offsets["early"]) - int(offsets["put"])) >= 1024
    assert text.count("tilescale::in_use((&(((float*)put)[0])));") == 2


def exchanged() -> Any:
    """Each block ends with half of each tile; its earlier content is dead."""

    @T.prim_func
    def program(X: T.Tensor((8, 4096), "float32"), Y: T.Tensor((8, 4096), "float32")):
        with T.Kernel(cta_cluster=2, block=8, threads=64) as b:
            with T.Scale("block"):
                early, held, got = (T.alloc((4096,), "float32") for _ in range(3))
                T.copy(X[b, 0], early)
                for i in T.Parallel(4096):
                    X[b, i] = early[4095 - i]
                T.copy(Y[b, 0], held)
                T.all_to_all(held, got)
                T.copy(got, Y[b, 0])

    return program


def test_what_peers_read_between_barriers_keeps_its_place_that_long():
    """Longer live ranges would cost shared memory: a tile of an exchange at the end may reuse that of an earlier loop.
    """
    text = bodies(source(exchanged()))
    offsets = {name: int(at) for name, at in re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)", text)}
    assert abs(offsets["held"] - offsets["got"]) >= 4 * 4096
    assert offsets["early"] in (offsets["held"], offsets["got"])
    begin, end = (m.start() for m in re.finditer(r"cluster_barrier\(\);", text))
    assert begin < text.index("tilescale::in_use((&(((float*)held)[0])));") < end


def test_words_of_a_peer_are_on_their_way_at_once():
    """Up to eight: 1024 words of 16 bytes, half of them from each block, by 64 threads."""
    words = re.findall(r"cluster_get<16>\((.*)\);", bodies(source(exchanged())))
    assert [call.count("(bool)1") for call in words] == [8, 8]


def test_words_are_as_wide_as_both_sides_allow():
    def width(**options) -> set[int]:
        return {int(n) for n in re.findall(r"cluster_(?:put|get)<(\d+)>", source(programs.ring(2, **options)))}

    assert width(n=256, dtype="float16") == {16}
    assert width(n=24, dtype="float16") == {8}
    assert width(n=6, dtype="int8") == {1}
    assert width(n=256, dtype="float64") == {8}


def test_ranks_of_a_cluster_of_two_dimensions():
    text = bodies(source(EVERY["grid"]))
    # rank * 10, rank = x in the cluster + 2 * y in the cluster; the cluster's number * 100.
    for term in ("(((int)blockIdx.x) & 1) * 10)", "(((int)blockIdx.y) & 1) * 20)", "(((int)blockIdx.x) >> 1) * 100)"):
        assert term in text
    assert "(((int)blockIdx.y) >> 1) * 200)" in text


def test_a_signal_follows_what_was_put():
    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32"), F: T.Tensor((4,), "int32")):
        with T.Kernel(cta_cluster=2, block=4, threads=64) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((64,), "float32")
                theirs = T.alloc((64,), "float32")
                T.copy(X[b, 0], mine)
                T.copy(mine, theirs, dst=1 - rank, signal=F[b - rank + 1 - rank])
                T.wait(F[b], ">=", 1)
                T.copy(theirs, X[b, 0])

    text = bodies(source(program))
    order = [
        "cluster_put<16>",
        "tilescale::complete_stores();",
        "__syncthreads();",
        "tilescale::signal<0, int>",
        "tilescale::wait<",
    ]
    at = 0
    for step in order:
        at = text.index(step, at)


# -- the cluster as one unit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["rows", "columns"])
def test_what_all_programs_need_is_loaded_once(split):
    text = bodies(source(programs.product(split=split)))
    shared, own = ("B", "A") if split == "rows" else ("A", "B")
    assert f"tma_load_multicast({shared}_desc" in text and f"tma_load({own}_desc" in text
    assert "(uint16_t)(3)" in text and "cluster_get" not in text
    # A writer of a stage has been signalled by every warp of both programs; each waits for its own instance.
    assert re.search(r"empty\d+\[0\]\.init\(16\)", text) and re.search(r"full\d+\[0\]\.init\(1\)", text)
    assert text.index("tl::cluster_sync();") < text.index("tma_load")


def roles(text: str) -> tuple[str, str]:
    """The loading warps' branch, and that of the user's threads."""
    found = re.search(
        r"\n  if \(\d+ <= \(\(int\)threadIdx.x\)\) \{\n(.*?)\n  \} else \{\n(.*?)\n  \}\n", text, re.DOTALL
    )
    assert found is not None
    return found[1], found[2]


def test_warps_of_their_own_load_ahead():
    assert role_graph(programs.product()) == [
        "roles: compute (256 threads, 240 registers), load (128 threads, 24 registers)",
        "load -> compute: a, w (multicast); 3 stages",
    ]
    text = bodies(source(programs.product()))
    assert "__launch_bounds__(384, 1)" in text
    # All have begun when all barriers are initialized: no thread synchronizes again before the loads.
    assert text.index("tl::cluster_sync();") < text.index("tma_load") < text.index("cluster_barrier();")
    loading, using = roles(text)
    assert text.count("tma_load") == loading.count("tma_load") > 0
    # No barrier of the program in either loop: they wait for stages only.
    steps = [re.search(r"\n( *)for \(int step.*?\n\1\}", role, re.DOTALL)[0] for role in (loading, using)]
    assert not any(re.search("__sync(threads|_thread_partial)|cluster_barrier", loop) for loop in steps)
    assert "empty0[(step % 3)].wait((1 - " in steps[0] and "full0[(step_1 % 3)].wait((" in steps[1]
    assert "empty0[(step_1 % 3)].arrive((((int)threadIdx.x) & 31));" in steps[1]


def test_loading_warps_synchronize_wherever_the_others_do():
    loading, using = roles(bodies(source(programs.persistent())))
    assert loading.count("cluster_barrier();") == using.count("cluster_barrier();") == 5


def test_a_way_that_depends_on_memory_has_no_loading_warps():
    @T.prim_func
    def program(
        A: T.Tensor((256, 256), "float16"),
        B: T.Tensor((256, 64), "float16"),
        N: T.Tensor((2,), "int32"),
        C: T.Tensor((256, 64), "float32"),
    ):
        with T.Kernel(cta_cluster=2, block=4, threads=128):
            with T.Scale("cta_cluster") as (cluster, _):
                a = T.alloc((128, 64), "float16")
                w = T.alloc((64, 64), "float16")
                c = T.alloc((128, 64), "float32", level="l0")
                T.clear(c)
                steps = N[cluster]
                for k in T.Pipelined(steps, num_stages=2):
                    T.copy(A[cluster * 128, k * 64], a)
                    T.copy(B[k * 64, 0], w)
                    T.gemm(a, w, c)
                T.copy(c, C[cluster * 128, 0])

    assert role_graph(program) == ["compute -> compute: a, w (multicast); 2 stages"]
    text = bodies(source(program))
    assert "__launch_bounds__(128, 1)" in text and "tma_load_multicast" in text


def test_a_result_may_lie_where_loaded_tiles_were_unless_they_come_again():
    def places(**options) -> dict[str, int]:
        text = source(programs.matmul((512, 512, 512), **options))
        return {name: int(at) for name, at in re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)", text)}

    assert places()["out"] == 0
    assert places(stages=3, programs=2)["out"] >= 3 * (128 + 256) * 64 * 2


def test_the_example_with_the_tiles_of_benchmarks():
    program = load(NUMBERED[10]).cluster_gemm(1, 256, 512, 192, tile=(256, 256, 64), stages=4, dtype="bfloat16")
    loading, using = roles(bodies(source(program)))
    assert "tma_load_multicast(B_desc" in loading and "tma_store(C_desc" in using


def test_loads_that_no_bulk_copy_makes_go_round_through_shared_memory():
    program = programs.product(operand="each")
    text = bodies(source(program))
    assert "multicast" not in text
    assert text.count("tilescale::cluster_get<16>") == 2
    assert notes(program) == ["shares of w: fetched through distributed shared memory"]


def test_a_load_that_is_not_the_same_for_all_is_no_multicast():
    """Each program loads a row by a private index, from outside."""

    @T.prim_func
    def program(
        A: T.Tensor((256, 64), "float16"), B: T.Tensor((512, 64), "float16"), C: T.Tensor((256, 64), "float32")
    ):
        with T.Kernel(cta_cluster=2, block=4, threads=128) as b:
            odd = b * 32
            with T.Scale("cta_cluster"):
                a = T.alloc((128, 64), "float16")
                w = T.alloc((64, 64), "float16")
                c = T.alloc((128, 64), "float32", level="l0")
                T.clear(c)
                for _ in T.Pipelined(1, num_stages=2):
                    with T.Scale("block") as (rank, _):
                        T.copy(A[b * 64, 0], T.view(a, layout=T.FullRow))
                        T.copy(B[odd * 2, 0], T.view(w, layout=T.FullRow))
                    T.gemm(a, w, c)
                with T.Scale("block"):
                    T.copy(T.view(c, layout=T.FullRow), C[b * 64, 0])

    text = bodies(source(program))
    assert "multicast" not in text and "cluster_get" in text


def test_two_blocks_multiply_as_a_pair_on_blackwell():
    with use_machine("b200-sxm-8"):
        text = bodies(source(programs.product(), "b200-sxm-8"))
    assert "tcgen05mma_ss<tl::DataType::kBFloat16, true>" in text and "tmem_allocate<true>" in text
    assert "(((int)blockIdx.x) & 1) * 64)" in text  # half of the columns of B in each
    order = ["tcgen05mma_ss", "tcgen05_mma_arrive<true>", "product_done[0].wait", "tcgen05_ld_"]
    assert [text.index(step) for step in order] == sorted(text.index(step) for step in order)


# -- what has no lowering ----------------------------------------------------------------------------------------------


def test_a_barrier_of_the_whole_grid(mistake):
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                X[b] = 1
                T.barrier()  # <-

    with mistake(UnsupportedError, "T.barrier between all programs of a grid"):
        source(program)


def test_a_cluster_of_one_is_none(mistake):
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(cta_cluster=1, block=4, threads=32) as b:
            with T.Scale("block"):
                x = T.alloc((1,), "float32", level="l1")
                T.copy(X[b], x)
                T.allreduce(x)  # <-

    with mistake(UnsupportedError, "programs of a cluster do, from two on: T.Kernel(cta_cluster=2); or run it with"):
        source(program)


def test_a_bulk_copy_between_programs(mistake):
    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32) as b:
            with T.Scale("block") as (rank, _):
                a = T.alloc((64,), "float32")
                T.copy(X[b, 0], a)
                T.copy(a, a, dst=1 - rank, impl="tma")  # <-

    with mistake(UnsupportedError, "impl='tma'"):
        source(program)


@pytest.mark.parametrize("layout", [T.Replica, T.Shard(0, block=1)])
def test_a_view_that_is_no_share_of_a_clusters_tile(mistake, layout):
    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32):
            with T.Scale("cta_cluster"):
                a = T.alloc((4, 64), "float32")
                with T.Scale("block"):
                    T.clear(T.view(a, layout=layout))  # <-

    with mistake(UnsupportedError, "view of 'a'"):
        source(program)


def test_a_reduction_of_a_clusters_tile(mistake):
    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32):
            with T.Scale("cta_cluster"):
                a = T.alloc((4, 64), "float32", level="l0")
                s = T.alloc((4,), "float32", level="l0")
                T.clear(a)
                T.reduce_sum(a, s, dim=1)  # <-

    with mistake(UnsupportedError, "tl.tileop.reduce"):
        source(program)


def test_a_programs_own_value_where_its_cluster_executes(mistake):
    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32) as b:
            own = X[b]
            with T.Scale("cta_cluster") as (cluster, _):
                Y[cluster] = own  # <-

    with mistake(UnsupportedError, "'own', a value of one program"):
        source(program)


def test_the_first_programs_index_is_the_clusters():
    @T.prim_func
    def program(Y: T.Tensor((8,), "int32")):
        with T.Kernel(cta_cluster=2, block=8, threads=32) as b:
            twice = b * 2
            with T.Scale("cta_cluster") as (cluster, _):
                Y[cluster] = b
                Y[cluster + 4] = twice

    y = torch.zeros(8, dtype=torch.int32)
    tilescale.emulate(program, [y])
    assert y.tolist() == [0, 2, 4, 6, 0, 4, 8, 12]
    text = bodies(source(program))
    assert "= ((((int)blockIdx.x) >> 1) * 2);" in text and "= ((((int)blockIdx.x) >> 1) * 4);" in text
    assert text.count("if ((((int)blockIdx.x) & 1) < 1)") >= 1
