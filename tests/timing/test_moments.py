# SPDX-License-Identifier: MIT
"""Timelines of launches on GPUs, from the moments that blocks record."""

from pathlib import Path

import pytest

import tilescale
import tilescale.language as T
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.timing.moments import SIGNALLED, SIGNALS, WAITED, WAITS, moments_of, timeline_of

COUNT, CYCLES = 5, 2
"""Moments of a block; cycles of a nanosecond."""

SITES = [("T.signal(F)", None), ("T.wait(F >=)", None)]


def recorded(begin: int, *moments: tuple[int, int, int]) -> list[int]:
    """Words of a block whose SM's clock began at some cycle: (nanoseconds, site, kind). Time has steps of 32 ns."""
    words = [w for t, s, k in moments for w in (1_000_000 + t // 32 * 32, begin + CYCLES * t << 16 | s << 2 | k)]
    return words + [0] * (2 * COUNT - len(words))


def test_blocks_have_the_time_of_their_clocks():
    first = recorded(77, (0, 0, SIGNALS), (640, 0, SIGNALLED))
    second = recorded(9_999, (0, 1, WAITS), (900, 1, WAITED), (1_600, 0, SIGNALS), (1_920, 0, SIGNALLED))
    blocks = moments_of([*first, *second], COUNT)
    assert [len(block) for block in blocks] == [2, 4]
    line = timeline_of(blocks, SITES, "program")
    spans = {(span.unit, span.name): span for span in line.spans}
    assert spans["block 1", "T.wait(F >=)"].seconds == pytest.approx(900e-9)
    assert spans["block 1", "until T.signal(F)"].seconds == pytest.approx(700e-9)
    assert spans["block 0", "T.signal(F)"].begin_s == 0
    assert line.end_s == pytest.approx(1_920e-9)
    assert [(wait.name, wait.count) for wait in line.waits] == [("T.wait(F >=)", 1)]


@T.prim_func
def program(X: T.Tensor((8,), "float32")):
    with T.Kernel(device=1, block=2, threads=32) as block:
        flags = T.alloc_flags((2,))
        T.signal(flags[block], 1)
        T.wait(flags[1 - block], ">=", 1)
        for i in T.Parallel(4):
            X[block * 4 + i] = 1


def test_only_a_kernel_with_a_timeline_records():
    machine = Machine.load("h200-sxm-8")
    plain, timed = (tilescale.compile(program, machine=machine, timeline=it).source for it in (False, True))
    begin = "tilescale::begin_moments((&(wait_record[0])));"
    assert begin in timed and timed.startswith("#define TILESCALE_MOMENTS")
    assert begin not in plain and "#define TILESCALE_MOMENTS" not in plain


def test_an_emulated_kernel_has_none(tmp_path: Path):
    kernel = tilescale.compile(program, machine=Machine.load("h200-sxm-8"), timeline=True)
    with pytest.raises(UsageError, match="no timeline was recorded"):
        kernel.timeline(tmp_path / "trace.json")
