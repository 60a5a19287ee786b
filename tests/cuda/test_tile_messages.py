# SPDX-License-Identifier: MIT
"""Sums of tiles by words: on the host, with all ranks, blocks and threads at once; and the choice of words."""

import re
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda.host_ranks import LIMIT_NS, STRIDE, THREADS, Launch, Library
from tests.cuda.support import bodies, source
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running.collectives.kernels import ExchangeArgument

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

BLOCKS, SHIFT, SITE = 2, 1, 5

SHIM = """
#ifndef SHIM
#define SHIM
namespace tilescale {
enum Moment { WAITS, WAITED };
inline void note(int, Moment) {}
inline void drain() {}
inline void notify_host(const i64*) {}
inline i64 stopped(const i64* report) { return __atomic_load_n(report, __ATOMIC_SEQ_CST); }
inline int load_acquire(const int* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
}  // namespace tilescale
#endif
"""

PROGRAM = """{
  char* tile = x.target + blockIdx.x * BYTES;
  unsigned number = tilescale::last_message((const int*)x.counts, blockIdx.x);
  for (int turn = 0; turn < x.pieces; ++turn) {
    __syncthreads();
    if (threadIdx.x == 0) memcpy(tile, x.source + (turn * gridDim.x + blockIdx.x) * BYTES, BYTES);
    number = tilescale::following(number);
    __syncthreads();
    tilescale::reduce_tile<TYPE, tilescale::OP, RANKS, BYTES, 0, THREADS>(
        tile, (int*)x.workspace, x.stride, {x.rank, RANKS, 0, 1, x.shift, RANKS}, blockIdx.x, gridDim.x, (int*)x.counts,
        number, x.limit, x.report, x.site);
    __syncthreads();
    if (threadIdx.x == 0) memcpy(x.normed + (turn * gridDim.x + blockIdx.x) * BYTES, tile, BYTES);
  }
}
"""


@dataclass(frozen=True)
class TileSum:
    """A program that sums a tile several times, as a kernel of `Library`."""

    ranks: int
    dtype: str
    op: str
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * getattr(torch, self.dtype).itemsize

    def name(self, aligned: bool) -> str:
        return f"sum_{'aligned' if aligned else 'any'}"

    @property
    def text(self) -> str:
        entry = 'extern "C" __global__ void NAME(const __grid_constant__ tilescale::Exchange x)'
        types = {"float32": "float", "bfloat16": "__nv_bfloat16", "int32": "int"}
        values = {"TYPE": types[self.dtype], "OP": self.op.upper(), "RANKS": self.ranks, "BYTES": self.nbytes}
        values["THREADS"] = THREADS
        program = re.sub(rf"\b({'|'.join(values)})\b", lambda found: str(values[found[1]]), PROGRAM)
        headers = SHIM + header("siblings.cuh") + header("tile_messages.cuh")
        names = [self.name(aligned) for aligned in (True, False)]
        entries = [entry.replace("NAME", name) for name in names]
        return "".join([*(f"{each};\n" for each in entries), headers, *(f"{each} {program}" for each in entries)])


KERNELS = (
    TileSum(2, "float32", "sum", 2),
    TileSum(2, "float32", "max", 26),
    TileSum(3, "bfloat16", "sum", 4 * 13),
    TileSum(3, "float32", "sum", 6),
    TileSum(5, "int32", "sum", 26),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(KERNELS, tmp_path_factory.mktemp("host"))  # type: ignore[arg-type]


class Job:
    """Ranks that sum tiles of random numbers, call after call."""

    def __init__(self, library: Library, kernel: TileSum, limit_ns: int = LIMIT_NS):
        self.library, self.kernel, self.limit_ns = library, kernel, limit_ns
        self.memory = torch.zeros(kernel.ranks, STRIDE, dtype=torch.uint8)
        self.counts = torch.zeros(kernel.ranks, BLOCKS, dtype=torch.int32)
        self.reports = torch.zeros(kernel.ranks, 8, dtype=torch.int64)

    def call(self, turns: int, missing: int | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One call: the inputs and the results of each rank."""
        k = self.kernel
        shape, dtype = (turns, BLOCKS, k.elements), getattr(torch, k.dtype)
        given = [(8 * torch.randn(shape)).to(dtype) for _ in range(k.ranks)]
        if k.op == "max":
            given[0][..., 0], given[1][..., 1] = torch.nan, torch.nan
        made = [torch.zeros(shape, dtype=dtype) for _ in given]
        tiles = [torch.zeros(shape[1:], dtype=dtype) for _ in given]
        launches = [
            Launch(self.library.functions(k)[True], BLOCKS, THREADS, self.exchange(rank, tiles, given, made, turns))
            for rank in range(k.ranks)
            if rank != missing
        ]
        self.library.run(launches)
        return given, made

    def exchange(self, rank: int, tiles: Any, given: Any, made: Any, turns: int) -> ExchangeArgument:
        sides = {"source": given[rank], "target": tiles[rank], "normed": made[rank]}
        sides |= {"counts": self.counts[rank], "report": self.reports[rank], "workspace": self.memory}
        addresses = {name: tensor.data_ptr() for name, tensor in sides.items()}
        return ExchangeArgument(
            **addresses, stride=STRIDE, limit=self.limit_ns, rank=rank, shift=SHIFT, site=SITE, pieces=turns
        )


def combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The parts in the order of ranks, types of 16 bits in float32."""
    total = parts[0].float() if parts[0].is_floating_point() else parts[0]
    for part in parts[1:]:
        total = torch.maximum(total, part.float()) if op == "max" else total + part.to(total.dtype)
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_all_ranks_get_the_same_sums(library: Library, kernel: TileSum):
    job = Job(library, kernel)
    for turns in (1, 4, 3):
        given, made = job.call(turns)
        wanted = combined(given, kernel.op).nan_to_num(99)
        assert all(torch.equal(mine.nan_to_num(99), wanted) for mine in made)
    assert (job.counts == 8).all() and not job.reports.any()


def test_numbers_go_on_behind_the_largest(library: Library):
    job = Job(library, KERNELS[3])
    job.counts[:] = -2
    given, made = job.call(4)
    assert all(torch.equal(mine, combined(given, "sum")) for mine in made)
    assert (job.counts == 4).all(), "0 is left out, and slots alternate all the same"


def test_a_missing_rank_is_named(library: Library):
    job = Job(library, KERNELS[3], limit_ns=10**8)
    job.call(1, missing=1)
    stop, kind, site, peer, number, seen = job.reports[0, :6].tolist()
    assert (stop, kind, site, peer, number, seen) == (1, 3, SITE, 1, 1, 0)


def summed(
    rows: int, columns: int, dtype: str = "float32", level: str = "l1", taken: int = 0, other: str = ""
) -> Any:
    """Sums of tiles over two devices, or of their first rows."""

    @T.prim_func
    def program(X: T.Tensor((4, rows, columns), dtype), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((rows, columns), dtype, level=level)
                T.copy(X[bx, 0, 0], tile)
                if other == "copy":
                    T.copy(tile, X[bx, 0, 0], dst=1 - rank)
                if other == "barrier":
                    T.barrier()
                if other == "signal":
                    T.signal(F[0])
                T.allreduce(tile[0:taken, :] if taken else tile)
                T.copy(tile, X[bx, 0, 0])

    return program


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (dict(rows=2, columns=64), 512),
        (dict(rows=8, columns=128), 4096),
        (dict(rows=8, columns=129), None),  # more than 32 bytes a thread
        (dict(rows=1, columns=3), None),  # no whole number of words
        (dict(rows=8, columns=64, taken=2), 512),
        (dict(rows=2, columns=64, level="l0"), 512),
        (dict(rows=2, columns=64, dtype="bfloat16"), 256),
        (dict(rows=2, columns=64, dtype="float64"), None),
        (dict(rows=2, columns=64, other="copy"), None),  # which the collective orders
        (dict(rows=2, columns=64, other="barrier"), None),
        (dict(rows=2, columns=64, other="signal"), None),
    ],
    ids=str,
)
def test_small_tiles_go_by_words_where_nothing_else_is_ordered(given: dict[str, Any], nbytes: int | None):
    found = re.findall(r"reduce_tile<\w+, tilescale::SUM, 2, (\d+), 0, 128>", bodies(source(summed(**given))))
    assert found == ([str(nbytes)] if nbytes else [])
