# SPDX-License-Identifier: MIT
"""A wait in a producer: its warps stay converged, for any warp that sees the flag first."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import ordered_programs, register_programs
from tests.cuda.host_text import on_host
from tests.cuda.support import bodies, source
from tilelang_core.specialise import PRODUCER_THREADS
from tilescale.backends.cuda.headers import header
from tilescale.backends.tilelang.lowering.text_rewrites import wait_in_loading_warps
from tilescale.hda.current import use_machine
from tilescale.ops import ag_gemm, gemm_rs
from tilescale.ops.gemm_tiles import TILINGS, GemmSpec, concurrent_stores

STEPS = 8
NOBODY, FIRST, ALL = 0, 0b1, 0b1111  # warps, as bits
TEXT = "".join(map(header, ("memory.cuh", "sync.cuh", "producer.cuh")))
RETURNS = "if (threadIdx.x % threads >= warp) return;"


@pytest.mark.parametrize("sleepers", [NOBODY, FIRST])
def test_no_warp_of_a_producer_is_left_behind_its_stages(sleepers: int, tmp_path: Path):
    assert on_host(TEXT, "host_producer.h", tmp_path).stuck_warps(STEPS, sleepers) == 0


def test_warps_that_each_wait_for_the_flag_are(tmp_path: Path):
    """They arrive a phase after the loads, and see the parity of each stage's barrier alone."""
    assert RETURNS in TEXT
    assert on_host(TEXT.replace(RETURNS, ""), "host_producer.h", tmp_path).stuck_warps(STEPS, ALL) == 3


def test_the_warps_are_those_of_stock_tilelangs_producer():
    assert f"constexpr unsigned threads = {PRODUCER_THREADS}, warp = 32;" in TEXT


def gathered() -> Any:
    return ag_gemm.program(2, GemmSpec(512, 512, "bfloat16", TILINGS[0], True, False))


def scattered() -> Any:
    return gemm_rs.program(2, concurrent_stores(GemmSpec(512, 512, "bfloat16", TILINGS[0], True, False)), 132)


@pytest.mark.parametrize(
    ("made", "threads", "waits"),
    [
        (register_programs.PROGRAMS["sums_over_two_loops"], 128, 1),
        (ordered_programs.PROGRAMS["loaded_ahead"], 128, 0),
        (gathered, 128, 2),
        (scattered, 64, 1),
    ],
    ids=["in a loop", "by all threads", "waits for flags", "persistent roles"],
)
def test_the_warp_that_loads_waits_for_stages_alone(made: Any, threads: int, waits: int):
    """Others see phases by parity: one that is two phases behind at the end of a loop would wait forever."""
    with use_machine("h200-sxm-8"):
        text = bodies(source(made()))
    assert text.count(f"if (((int)threadIdx.x) % {threads} < 32) ") == waits
    assert not re.search(r"^ +\w+\[.*\]\.wait\(.*\);\n +if \(tl::tl_shuffle_elect<(64|128)>", text, re.MULTILINE)


LOOP = """  for (int k = 0; k < 8; ++k) {{
    empty[(k & 1)].wait(((k >> 1) ^ 1));
    if (tl::tl_shuffle_elect<128>()) {{
      tl::tma_load(A_desc, full[(k & 1)], a, k, 0);
    }}
{rest}  }}
"""


@pytest.mark.parametrize(
    ("rest", "guarded"),
    [
        ("", True),
        ("    count[0] = (count[0] + 1);\n", True),
        ("    int at = (k * 2);\n", True),
        ("    a[(k & 1)] = X[k];\n", False),
        ("    full[(k & 1)].arrive();\n", False),
        ("    tl::cp_async_gs<16>(a, X);\n", False),
        ("    __syncthreads();\n", False),
    ],
)
def test_all_warps_wait_that_load_or_synchronize(rest: str, guarded: bool):
    text = LOOP.format(rest=rest)
    made = text.replace("    empty[", "    if (((int)threadIdx.x) % 128 < 32) empty[")
    assert wait_in_loading_warps(text) == (made if guarded else text)
    assert wait_in_loading_warps(made) == made
