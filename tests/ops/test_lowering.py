# SPDX-License-Identifier: MIT
"""Lowered programs of operators on GPUs: producers load, copy queues send; and the chosen tiles."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from tilelang.cuda.op.gemm.gemm_wgmma import GemmWGMMA

from tests.cuda.support import notes, ptxas, source
from tests.cuda.support import program as taken
from tilescale.backends.tilelang.lowering import split_grid
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.ops.block_gemm import block_tiling
from tilescale.ops.expert_programs import LayerForm
from tilescale.ops.few_rows import few_rows_tiling, is_able
from tilescale.ops.gemm_tiles import (
    BARRIERS,
    CHUNK,
    DEPTH,
    STORED,
    TILINGS,
    GemmSpec,
    GemmTiling,
    concurrent_stores,
    in_parts,
    slices,
    summed_tiling,
    tiling,
)
from tilescale.ops.key_cache import CacheLayout
from tilescale.program.effects import phases
from tilescale.program.waiting import waits_across

LARGE = TILINGS[0]


def program(name: str, *given: Any) -> Any:
    return import_module(f"tilescale.ops.{name}").program(*given)


ROLES = "roles: compute (256 threads{}), load (128 threads{})"
KEPT = "persistent roles: compute (256 threads, 240 registers), load (128 threads, 24 registers)"
STORING = (
    "persistent roles: compute (256 threads, 232 registers), load (64 threads, 40 registers), "
    "store (64 threads, 40 registers)"
)
SUMMING = (
    "persistent roles: compute (256 threads, 192 registers), load (128 threads, 24 registers), "
    "communicate (128 threads, 96 registers)"
)
WAITING = [ROLES.format(", 232 registers", ", 40 registers"), "load -> compute: a, b; 4 stages, 1 T.wait by load"]


def queued(tensors: str) -> str:
    """Remarks on copies of some tensors by the copy queue."""
    return f"T.copy(dst=, signal=) of {tensors} by each device: asynchronous, on the copy queue"


def loaded(stages: int) -> str:
    """The channel of a loop without waits."""
    return f"load -> compute: a, b; {stages} stages"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: program("ag_gemm", 2, GemmSpec(512, 512, "bfloat16", LARGE, True, True)),
            [queued("A, G"), *WAITING, split_grid.NOTE],
        ),
        (
            lambda: program("ag_columns_gemm", 3, GemmSpec(512, 512, "bfloat16", LARGE, True, True)),
            [queued("A, G"), *WAITING],
        ),
        (
            lambda: program("gemm_rs", 2, GemmSpec(512, 512, "bfloat16", LARGE, False, True)),
            [queued("parts, parts_inbox"), ROLES.format("", ""), loaded(4)],
        ),
        (
            lambda: program("gemm_rs", 2, GemmSpec(512, 512, "bfloat16", PERSISTENT, True, False), 8),
            [queued("parts, parts_inbox"), STORING, loaded(3), "compute -> store: out; 1 stage"],
        ),
        (
            lambda: program("gemm_rs", 2, GemmSpec(512, 512, "float8_e4m3fn", PERSISTENT, True, False), 8),
            [queued("parts, parts_inbox"), STORING, loaded(3), "compute -> store: out; 1 stage"],
        ),
        (
            lambda: program("ag_gemm", 2, GemmSpec(512, 512, "bfloat16", PERSISTENT, True, False), True, 1, 4),
            [queued("A, G"), KEPT, loaded(3), "compute -> next iteration: out; 1 stage"]
            + [f"persistent {WAITING[0]}", f"{loaded(3)}, 1 T.wait by load", split_grid.NOTE],
        ),
        (
            lambda: program("gemm_ar", 4, GemmSpec(512, 512, "bfloat16", replace(LARGE, stages=3), True, False), 8),
            ["T.allreduce of level 'device': one_shot through device memory"]
            + [SUMMING, loaded(3), "compute -> communicate: out; 1 stage"],
        ),
        (
            lambda: program("all_to_all", 4, 512, "bfloat16", 4096, False),
            [queued("A, G")],
        ),
    ],
    ids=[
        "ag_gemm",
        "ag_columns_gemm",
        "gemm_rs",
        "in turns",
        "scaled in turns",
        "gathered in turns",
        "gemm_ar",
        "all_to_all",
    ],
)
def test_queues_send_and_producers_load(made: Any, said: list[str]):
    assert [re.sub(r" \(line \d+\)", "", note) for note in notes(made())] == said


@pytest.mark.parametrize("blocks", [0, pytest.param(8, marks=pytest.mark.nightly)])
def test_what_peers_have_sent_is_loaded_without_conditions(blocks: int):
    """Loads with a condition wait for one another: 8192 x 8192 x 3584 on two H100 took 5 % longer."""
    text = source(program("gemm_rs", 2, GemmSpec(512, 512, "bfloat16", PERSISTENT, True, False), blocks))
    whole, last = re.findall(r"^.*\(parts_inbox \+.*$", text, re.MULTILINE)
    assert all("uint4" in load and "condval" not in load for load in (whole, last))
    assert "rows) - (int64_t)1" in last and "rows) - (int64_t)1" not in whole, "offsets of rows are constants"


def test_only_the_last_columns_of_what_peers_have_sent_are_loaded_with_conditions():
    text = source(program("gemm_rs", 2, GemmSpec(520, 512, "bfloat16", replace(LARGE, n=128), True, False)))
    loads = re.findall(r"^.*\(parts_inbox \+.*$", text, re.MULTILINE)
    assert ["condval" in load for load in loads] == [False, False, True]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tiles", TILINGS, ids=lambda tiles: f"{tiles.m}x{tiles.n}")
def test_as_many_steps_are_loaded_ahead_as_there_is_room_for(tiles: GemmTiling, gated: bool):
    machine = Machine.load("h200-sxm-8")
    with use_machine(machine):
        of = GemmSpec(512, 512, "bfloat16", replace(tiles, n=tiles.n // (1 + gated)), True, False, gated=gated)
        made = concurrent_stores(of)
    stored, room = 2 * made.tiles.m * made.tiles.n, machine.capacity("l1")
    taken = [stored + stages * made.step_bytes for stages in (made.tiles.stages, made.tiles.stages + 1)]
    assert taken[0] < room and (made.tiles.stages == tiles.stages or taken[1] > room - BARRIERS)


def test_tiles_that_are_summed_are_small_where_nothing_hides_their_sum():
    with use_machine(Machine.load("h200-sxm-8")):
        made = {rows: summed_tiling(rows, 8192, 2) for rows in (16, 128, 256, 1024, 4096, 4097)}
        assert summed_tiling(4096, 8192, 4)[0].n == 128
    assert [(t.m, t.n, blocks) for t, blocks in made.values()] == [
        (64, 64, 0), (128, 64, 0), (128, 128, 0), (128, 128, 132), (128, 256, 132), (128, 256, 132)
    ]  # fmt: skip
    for tiles, blocks in made.values():
        stored = 2 * tiles.m * tiles.n if blocks else 0
        assert stored + tiles.stages * 128 * tiles.deep * (tiles.m + tiles.n) <= 226 << 10 and tiles.stages >= 3


@pytest.mark.parametrize(
    ("rows", "N", "high", "wide", "parts", "blocks"),
    [
        (1, 200, 16, 64, 2, 8),
        (16, 4096, 16, 64, 2, 128),
        (16, 5120, 16, 64, 1, 80),
        (17, 5120, 32, 64, 2, 160),
        (2, 14336, 16, 128, 1, 112),
        (32, 14336, 32, 64, 1, 224),
        (16, 132 * 128, 16, 128, 1, 132),
    ],
)
def test_all_parts_of_few_rows_run_at_once(rows: int, N: int, high: int, wide: int, parts: int, blocks: int):
    machine = Machine.load("h200-sxm-8")
    with use_machine(machine):
        tiles, found = few_rows_tiling(rows, N)
    of = GemmSpec(N, 512, "bfloat16", tiles, True, False)
    assert (tiles.m, tiles.n, found, tiles.columns(N) * found) == (high, wide, parts, blocks)
    assert is_able(machine, rows, N) and blocks <= 2 * machine.program_units and tiles.stages >= 3
    room = machine.capacity("l1") // 2 - BARRIERS
    assert tiles.stages * of.step_bytes <= room < (tiles.stages + 1) * of.step_bytes


def test_few_rows_need_clusters_and_an_sm_for_each_tile():
    machine = Machine.load("h200-sxm-8")
    assert not is_able(machine, 33, 512) and not is_able(machine, 1, 17000)
    assert not is_able(Machine.load("a100-sxm-8"), 1, 512)


def test_few_rows_are_summed_by_words_without_another_copy():
    text = source(OPERATORS["few rows"]())
    assert "by words that carry their number" in " ".join(notes(OPERATORS["few rows"]()))
    assert text.count("tl::tma_load(") == 4 and "staged" not in text.split("tilescale::reduce_tile<")[-1]


def test_columns_come_in_slices_where_all_tiles_run_at_once():
    with use_machine(Machine.load("h200-sxm-8")):
        tiles = GemmTiling(128, 224, 1.0)
        assert slices(512, 2, tiles, 3584, 16384) == 4, "128 tiles, rows of a slice not shorter than they should be"
        assert slices(512, 2, tiles, 3808, 16384) == slices(513, 2, tiles, 3584, 16384) == 1, "tiles that follow others"
        assert slices(512, 2, tiles, 3584, 16256) == 1, "127 steps"
        assert slices(512, 2, tiles, 3584, 14336) == 2, "112 steps"
        assert slices(8, 2, tiles, 64, 100) == 1, "no whole steps"
    of = GemmSpec(512, 1024, "bfloat16", LARGE, True, False)
    made = program("ag_gemm", 2, of, True, 4)
    assert "load -> compute: a, b; 4 stages, 1 T.wait by load" in notes(made)
    assert re.search(r"if \(\(k % 4\) == 0\) \{\s*(int [^;]*;\s*)*tilescale::wait_by_producer<", source(made))


def test_gradients_in_e5m2_are_multiplied_with_weights_in_e4m3(monkeypatch: pytest.MonkeyPatch):
    of = GemmSpec(256, 256, "float8_e5m2", TILINGS[-1], True, False, other="float8_e4m3fn")
    assert "wgmma_ss<tl::DataType::kFloat8_e5m2, tl::DataType::kFloat8_e4m3," in source(program("gemm_rs", 2, of))
    monkeypatch.delattr(GemmWGMMA, "allow_f8f6f4_mixed_dtypes")
    with pytest.raises(UnsupportedError, match="Mixed-dtype"):  # otherwise tilelang_core/mixed_fp8.py can be removed
        source(program("gemm_rs", 2, replace(of, N=512)))


@pytest.mark.parametrize("rows", [1, 63, 64, 100, 1024, 2048, 2049, 32768])
@pytest.mark.parametrize("n", [8, 3584, 4096, 4104])
def test_tiles_fit_the_product(rows: int, n: int):
    for transposed in (True, False):
        found = tiling(rows, 2, n, transposed)
        assert found.n % (STORED if transposed else DEPTH) == 0
        gated = tiling(rows, 2, n, transposed, gemms=2)
        assert gated.n % DEPTH == 0 or (transposed and n % gated.n == 0), "two narrow products are slow"
    assert tiling(64, 1, 64, True).m == 64, "more blocks, not larger ones, where there are few tiles"


@pytest.mark.parametrize("rows", [1, 512, 1024, 1152, 2048, 8192])
def test_a_shard_of_several_chunks_has_several_groups(rows: int):
    tiles = tiling(rows, 2, 8192, True)
    parts = in_parts(tiles, rows)
    assert rows > parts.group * parts.m if rows > CHUNK else parts == tiles


def test_whole_waves_decide():
    assert (tiling(1024, 2, 3584, True).n, tiling(4096, 2, 8192, True).n) == (224, 256)
    assert tiling(579, 2, 5120, True).n == 208, "250 tiles on 132 SMs, not 200"
    assert tiling(1866, 2, 5120, True).n == 240, "600 tiles of 256 columns were five waves as well"


def test_tiles_that_take_long_to_add_to_are_for_long_products():
    """4096 x 4096 x 2048 on two H200: tiles of 208 columns take 145 us, of 256 columns 111 us."""
    assert [tiling(592, 2, 5120, True, adds=2 * K).n for K in (512, 8192)] == [256, 208]
    assert tiling(592, 2, 5120, True).n == 208, "nothing is added"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("scatter_program", (2, 132, 1)),
        pytest.param("scatter_program", (2, 268, 1), marks=pytest.mark.nightly),
        # Rows of 67 units would be summed in tiles of one, which any number of threads share.
        pytest.param("sum_program", (2, 264, 2, "bfloat16", 8, False), marks=pytest.mark.nightly),
    ],
)
def test_rows_of_any_width_have_a_layout(name: str, given: tuple[Any, ...]):
    """Of 33 and of 67 units, which 256 threads do not share evenly: float8 with its scales has such rows."""
    source(getattr(import_module("tilescale.ops.row_exchange"), name)(*given))


def test_rows_wait_for_blocks_of_lower_numbers_only():
    """So a grid of any extent makes progress, with any set of resident blocks."""
    made, few = (import_module(f"tilescale.ops.{name}") for name in ("row_exchange", "low_latency_program"))
    machine = Machine.load("h200-sxm-8")
    programs = [made.scatter_program(2, 512, 2), made.sum_program(2, 512, 2, "bfloat16", 8, True)]
    for func in (*programs, few.low_latency_program(2, 8, 2, 512, 512, "int64", LayerForm("bfloat16"), 132)):
        taken_apart = taken(func)
        for phase, launch in phases(taken_apart.body):
            assert waits_across(phase, launch, taken_apart, machine, {"device": 2}) is None


def of(n: int, k: int, tiles: GemmTiling, *how: bool, dtype: str = "bfloat16") -> GemmSpec:
    return GemmSpec(n, k, dtype, tiles, *how)


def made(module: str, function: str, *given: Any) -> Any:
    return lambda: getattr(import_module(f"tilescale.ops.{module}"), function)(*given)


EXPERTS = 2, 8, 2, 512, 512, "int64"


def layer_of_experts(by_rows: bool | None, **form: bool) -> Any:
    return made("expert_programs", "layer_program", *EXPERTS, LayerForm("bfloat16", by_rows, **form), 132)


WIDE = (CacheLayout("bfloat16"), CacheLayout("bfloat16"))
HEADS = ("bfloat16", False, True, 0.1)
BLOCKS = GemmSpec(512, 512, "float8_e4m3fn", block_tiling(4096), True, False, blocks=True)
PERSISTENT = replace(LARGE, stages=3)
OPERATORS = {
    "ag_gemm": made("ag_gemm", "program", 2, of(512, 512, LARGE, True, True)),
    "ag_gemm in turns": made("ag_gemm", "program", 2, of(512, 512, PERSISTENT, True, False), True, 1, 4),
    "ag_gemm side by side": made("ag_gemm", "program", 2, replace(of(512, 512, LARGE, True, True), parts=(256, 256))),
    "gemm_rs": made("gemm_rs", "program", 2, of(512, 512, LARGE, False, True)),
    "gemm_rs in turns": made("gemm_rs", "program", 2, of(512, 512, PERSISTENT, True, False), 8),
    "ag_columns_gemm": made("ag_columns_gemm", "program", 2, of(512, 512, LARGE, True, True)),
    "gemm_ag": made("gemm_ag", "program", 2, of(512, 512, LARGE, True, True)),
    "gemm_rs with block scales": made("gemm_rs", "program", 2, BLOCKS),
    "gemm_ar in turns with block scales": made("gemm_ar", "program", 2, BLOCKS, 8),
    "gated ag_gemm with block scales": made("ag_gemm", "program", 2, replace(BLOCKS, gated=True)),
    "gemm_ar": made("gemm_ar", "program", 2, of(512, 512, TILINGS[-1], True, True), 0),
    "gemm_ar in turns": made("gemm_ar", "program", 4, of(512, 512, PERSISTENT, True, False), 8),
    "few rows": made("few_rows", "program", 2, of(512, 2048, GemmTiling(32, 64, 1.0), True, True), 2),
    "all_gather": made("whole_tensors", "program", 2, "all_gather", "bfloat16", "direct"),
    "reduce_scatter": made("whole_tensors", "program", 2, "reduce_scatter", "bfloat16", "direct"),
    "sum": made("whole_tensors", "sum_program", 2, "bfloat16", "sum", "two_shot"),
    "broadcast": made("whole_tensors", "broadcast_program", 2, 1, "direct"),
    "float8 on the wire": made("whole_tensors", "sum_program", 2, "bfloat16", "sum", "two_shot", "float8_e4m3fn"),
    "all_to_all": made("all_to_all", "program", 4, 512, "bfloat16", 4096, False),
    "all_to_all_v": made("all_to_all_v", "program", 2, "bfloat16"),
    "norm": made("all_reduce_rms_norm", "program", 2, 4096, "bfloat16", True, 1e-5, "one_shot"),
    "norm in one kernel": made("all_reduce_rms_norm", "by_one_kernel", 2, 4096, "bfloat16", True, 1e-5, "one_shot"),
    "scatter": made("row_exchange", "scatter_program", 4, 512, 2),
    "sum of rows": made("row_exchange", "sum_program", 4, 1024, 2, "bfloat16", 16, True),
    "numbers of rows": made("moe_tables", "returns_program", 2, 8),
    "experts": layer_of_experts(None, keeps=True),
    "gradients of experts": made("expert_programs", "layer_gradient_program", 2, 8, 2, 512, 512, "bfloat16", 132),
    "grouped": made("grouped_gemm", "program", 0, 512, 512, "bfloat16", True, 132),
    "gradients of weights": made("grouped_gemm", "outer_program", 0, 8, 512, 512, "bfloat16"),
    "scaled": made("grouped_float8", "scaled_program", 512, 512, 512),
    "float8 experts": layer_of_experts(False),
    "float8 sums": layer_of_experts(False, narrow_sums=True),
    "trained in float8": layer_of_experts(False, keeps=True),
    "few tokens": made("low_latency_program", "low_latency_program", *EXPERTS, LayerForm("bfloat16", False), 132),
    "rounding": made("rounding", "rows_program", 4096, "float8_e4m3fn"),
    "rounding squares": made("rounding", "squares_program", 512, "float8_e4m3fn", True),
    "rounding tiles": made("rounding", "tiles_program", None, 512, "float8_e4m3fn", True, True),
    "decode": made("decode", "program", 2, 16, 4, 128, 128, 4, 8, *HEADS, *WIDE),
    "latent": made("decode", "program", 2, 128, 1, 576, 512, 4, 8, "bfloat16", True, False, 0.1, *WIDE),
    "pages": made("decode", "program", 2, 16, 4, 128, 128, 4, 8, *HEADS, *[CacheLayout("bfloat16", 16, 2)] * 2),
    "float8": made("decode", "program", 2, 16, 4, 128, 128, 4, 8, *HEADS, *[CacheLayout("float8_e4m3fn", 48)] * 2),
    "attention": made("sequence_attention", "program", 2, 1, 8, 4, 128, "bfloat16", True, True, True, 0.1),
    "backward": made("attention_backward", "program", 2, 1, 8, 4, 128, "bfloat16", True, True, True, 0.1),
    "backward, gathered": made("attention_backward", "program", 2, 1, 8, 4, 128, "bfloat16", False, False, False, 0.1),
}
OF_DECODE = [
    "before the store to shares: threads synchronize (stored)",  # by replicas of a fragment, in the next iteration
    "before the load of inbox: threads synchronize (stored)",  # this rank's part, which nothing is waited for
]
BEFORE = "before the store to before: threads synchronize (stored)"
"""Its last row is a block's that wrote others."""
OWN, WHICH = (f"before the load of {name}: threads synchronize (stored)" for name in ("own", "which"))
"""In place of some of stock TileLang's."""
TABLES = "lines", "slot"
NEEDED = {
    "ag_gemm side by side": ["before the load of out: threads synchronize (stored)"],  # in a branch
    **dict.fromkeys(("decode", "pages", "float8"), OF_DECODE),
    **dict.fromkeys(("scatter", "gradients of experts"), [OWN]),
    "experts": [BEFORE, OWN],
    **dict.fromkeys(("float8 experts", "trained in float8"), [BEFORE, WHICH]),
    "few tokens": [
        "before the store to total: threads synchronize (stored)",  # zeros, which other threads add to
        *(f"before the store to {name}: threads synchronize (read)" for name in ("turned", "out")),  # of the last tile
    ],
    "float8 sums": [BEFORE, WHICH, *(f"before the load of {name}: threads synchronize (stored)" for name in TABLES)],
}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_decode_keeps_its_state_in_registers():
    said = ptxas(source(OPERATORS["float8"]()))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


AT_NIGHT = (
    "gemm_rs in turns", "gemm_rs with block scales", "gated ag_gemm with block scales", "norm", "float8 sums",
    "trained in float8", "latent", "pages", "float8", "backward, gathered",
)  # fmt: skip
"""Forms and types that are compiled at night; by day another one of each kind is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in OPERATORS]
)
def test_no_barrier_is_inserted_that_an_operator_does_not_need(name: str):
    with use_machine(Machine.load("h200-sxm-8")):
        said = [re.sub(r" in line \d+", "", note) for note in notes(OPERATORS[name]())]
    assert [note for note in said if note.startswith(("before ", "the update"))] == NEEDED.get(name, [])


def test_threads_of_persistent_blocks_synchronize_where_their_number_is_a_power_of_two():
    """A trip count by a shift let stock TileLang find 30 threads at a barrier of the loop."""
    assert "for (int iteration = 0;" in source(OPERATORS["gemm_ar in turns"]())


@pytest.mark.parametrize(
    ("kind", "page", "loads"),
    [
        ("bfloat16", 96, 4),
        pytest.param("bfloat16", 16, 8, marks=pytest.mark.nightly),
        pytest.param("bfloat16", 256, 1, marks=pytest.mark.nightly),
        pytest.param("float8_e4m3fn", 48, 4, marks=pytest.mark.nightly),
    ],
)
def test_keys_in_pages_come_as_bulk_copies(kind: str, page: int, loads: int):
    """As many for a step of 64 keys; of 64 columns where tensor cores read a part of a page as it comes."""
    text = source(program("decode", 1, 4, 2, 128, 128, 2, 4, *HEADS, *[CacheLayout(kind, page)] * 2))
    assert [len(re.findall(rf"tma_load\({x}_desc", text)) for x in "KV"] == [loads, loads]
