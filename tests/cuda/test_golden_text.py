# SPDX-License-Identifier: MIT
"""The CUDA text of small programs, kernel by kernel: what the stock compiler makes of the lowering is looked at."""

import re
from functools import cache
from pathlib import Path

import pytest

import tilescale.language as T
from tests.cuda import overlap_programs, programs, turn_programs
from tests.cuda.support import bodies, lowered, source
from tests.language import programs as reference

GOLDEN = Path(__file__).parents[1] / "golden" / "cuda"

PROGRAMS = {
    "put_with_signal_tma": lambda: programs.put_with_signal(impl="tma"),
    "put_with_signal_lsu": lambda: programs.put_with_signal(impl="lsu"),
    "put_with_own_flags": programs.put_with_own_flags,
    "barrier": programs.barrier,
    "allreduce_tile": programs.sum_of_tiles,
    "allreduce_fn": programs.merged_tensors,
    "warpgroup_gemm": lambda: reference.tensor_parallel_gemm(4, 128, 128, 512),
    "device_phase": programs.steps,
    "overlap_ag": lambda: overlap_programs.ag_gemm(shape=(2048, 512, 512)),
    "overlap_ag_persistent": lambda: overlap_programs.ag_gemm(shape=(2048, 512, 512), stages=2, blocks=12),
    "overlap_ag_senders": lambda: overlap_programs.ag_gemm_senders(
        shape=(2048, 512, 512), stages=2, blocks=12, senders=4
    ),
    "overlap_ag_by_loads": lambda: overlap_programs.ag_gemm_by_loads(shape=(2048, 512, 512), waits=True),
    "overlap_rs": lambda: overlap_programs.rs_gemm(shape=(2048, 512, 512)),
    "overlap_rs_direct": lambda: overlap_programs.rs_gemm(shape=(2048, 512, 512), direct=True),
    "overlap_rs_persistent": lambda: overlap_programs.rs_gemm(shape=(2048, 512, 512), stages=2, blocks=12),
    "turns_allreduce": lambda: turn_programs.sums(2, (1024, 2048, 256), 12),
    "overlap_put": lambda: overlap_programs.put(rows=1024, columns=1024, blocks=8),
}


@cache
def text_of(name: str) -> str:
    """The text of a program, made once."""
    return source(PROGRAMS[name]())


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_of_programs(name: str, golden):
    golden(f"cuda/{name}", bodies(text_of(name)))


def test_every_golden_text_has_its_program():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == PROGRAMS.keys()


OFTEN = ("put_with_own_flags", "allreduce_fn", "warpgroup_gemm", "overlap_ag_senders", "overlap_rs_persistent")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.nightly) for n in PROGRAMS])
def test_the_same_program_gives_the_same_text(name: str):
    assert source(PROGRAMS[name]()) == text_of(name)


def test_text_carries_the_header_once():
    """The header is part of the text, so of every cache key; several kernels in one file include it once."""
    text = source(programs.whole_copy())
    assert text.count("#ifndef TILESCALE_SYNC_CUH") == text.count("#define TILESCALE_SYNC_CUH") >= 2
    assert "tilescale::signal<" in text and "__device__ inline void signal(" in text
    kernels = lowered(programs.whole_copy()).kernels
    assert all("#ifndef TILESCALE_SYNC_CUH" in kernel.func.script(show_meta=True) for kernel in kernels)


def test_a_gemm_is_waited_for_before_its_tiles_are_loaded_again():
    """`wg_wait` leaves a GEMM running while the step's tiles go back to the producer: stock TileLang's own race."""

    @T.prim_func
    def f(A: T.Tensor((128, 512), "bfloat16"), B: T.Tensor((64, 512), "bfloat16"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(device=1, block=1, threads=128):
            a, b = T.alloc((128, 64), "bfloat16", level="l1"), T.alloc((64, 64), "bfloat16", level="l1")
            c = T.alloc((128, 64), "float32", level="l0")
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, c, transpose_B=True, annotations={"wg_wait": 1})
            T.copy(c, C)

    waits = re.findall(r"tl::warpgroup_wait<(\d+)>", bodies(source(f)))
    assert waits and {*waits} == {"0"}
