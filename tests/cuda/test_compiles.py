# SPDX-License-Identifier: MIT
"""Generated code compiles: every example's program and the small ones, for each architecture."""

import shutil
from importlib import import_module
from typing import Any

import pytest

from tests.cuda import cluster_programs, gated_programs, programs, thread_group_programs
from tests.cuda.support import example_programs, texts
from tests.cuda.thread_group_programs import CASES
from tests.fuzz.together import by_headers, joined, renamed
from tests.language import programs as reference
from tests.ops import expert_grids
from tilelang_core import compile as stock
from tilescale.backends.cuda.target import target_for
from tilescale.errors import UnknownLevelError, UsageError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.ops import (
    expert_programs,
    grouped_float8,
    low_latency_program,
    moe_tables,
    rounding,
    row_exchange,
)
from tilescale.ops.expert_programs import LayerForm
from tilescale.ops.key_cache import CacheLayout

pytestmark = [
    pytest.mark.nightly,  # long compilations
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]

PROGRAMS = {
    "tma": lambda: [programs.put_with_signal(impl="tma")],
    "lsu": lambda: [programs.put_with_signal(impl="lsu")],
    "barrier": lambda: [programs.barrier()],
    "allreduce_tile": lambda: [programs.sum_of_tiles()],
    "allreduce_fn": lambda: [programs.merged_tensors()],
    "gathered": lambda: [programs.merged_tensors("nccl")],
    "device_phase": lambda: [programs.steps()],
    "whole_copy": lambda: [programs.whole_copy()],
}


EXAMPLES = {
    "h200-sxm-8": set(example_programs()),
    "b200-sxm-8": {"10_cluster_gemm", "12_sender_role"},
    "a100-sxm-8": {"06_ag_gemm", "08_tp_gemm", "10_cluster_gemm"},
}
"""All of them where they were measured; elsewhere some of each kind, as compiling takes half a minute a dozen."""

LACKS = {"a100-sxm-8": {"08_tp_gemm", "10_cluster_gemm", "tma"}}
"""Programs of levels (warpgroups, clusters) or mechanisms (bulk copies) that a machine does not have."""


def clusters() -> list[Any]:
    """Programs whose blocks share tiles."""
    return [
        cluster_programs.ring(8),
        cluster_programs.allreduce(4, "bfloat16", "sum"),
        cluster_programs.allreduce(2, "int8", "max", "l0"),
        cluster_programs.skewed(4),
        cluster_programs.collectives(),
        cluster_programs.product(),
        cluster_programs.product(split="columns"),
        cluster_programs.product(size=4, tile=(256, 64, 64)),
        cluster_programs.epilogue(bm=256),
        cluster_programs.persistent(bm=256),
        cluster_programs.variables(),
    ]


def decode(heads: int, of_keys: int, dim: int, value_dim: int, dtype: str, is_latent: bool, of: CacheLayout) -> Any:
    """Attention of one token to keys in pages, by two ranks."""
    make = import_module("tilescale.ops.decode").program
    return make(2, heads, of_keys, dim, value_dim, 4, 8, dtype, is_latent, False, 0.1, of, of)


def operators() -> list[Any]:
    """Those whose blocks move data, or multiply, by tables."""
    return [
        moe_tables.tables_program(2, 32, 8, "int64", True),
        moe_tables.returns_program(2, 8),
        expert_grids.works.gated_program(2, 768, 512, "bfloat16", False, 132),
        expert_programs.layer_program(2, 32, 8, 512, 16, "int64", LayerForm("bfloat16", keeps=True, narrow=True), 132),
        expert_programs.layer_gradient_program(2, 32, 8, 512, 16, "bfloat16", 132),
        row_exchange.scatter_program(2, 3584, 8),
        row_exchange.sum_program(4, 512, 2, "bfloat16", 8, True),
        grouped_float8.scaled_program(512, 512, 528),
        expert_grids.works.scaled_gated_program(2, 512, 512),
        expert_programs.layer_program(2, 8, 8, 512, 512, "int64", LayerForm("bfloat16", True, True, False, True), 132),
        expert_grids.scatter_float8_program(2, 512, 8),
        low_latency_program.low_latency_program(2, 8, 8, 512, 512, "int64", LayerForm("bfloat16", False), 132),
        *(rounding.squares_program(512, "float8_e4m3fn", across) for across in (False, True)),
        decode(16, 4, 128, 128, "bfloat16", False, CacheLayout("bfloat16", 16)),
        decode(128, 1, 576, 512, "float16", True, CacheLayout("float8_e4m3fn", 64)),
    ]


def thread_groups() -> list[Any]:
    """Programs of units inside a block."""
    return [
        *(CASES[name].make() for name in ("roles", "columns split", "nested")),
        thread_group_programs.couriers(4),
        thread_group_programs.namesakes(4),
        gated_programs.arriving(devices=2, **gated_programs.VARIANTS["one stage"]),
        gated_programs.arriving(devices=2, **gated_programs.VARIANTS["turns, in front"]),
        gated_programs.arriving(devices=2, **gated_programs.VARIANTS["each step and in front"]),
        reference.context_parallel_mla(4, 1, 16, 256, 64, 32, 16, 64, reference.exchanged),
    ]


GROUPS = {"examples": [], "others": [clusters, operators, thread_groups], "b200": [clusters], "a100": []}


@pytest.mark.parametrize(
    ("machine", "which"),
    [
        ("h200-sxm-8", "examples"),
        ("h200-sxm-8", "others"),
        ("b200-sxm-8", "b200"),
        ("a100-sxm-8", "a100"),
    ],
)
def test_text_compiles(machine: str, which: str):
    """In few files: two or three seconds of each are its headers'."""
    described = Machine.load(machine)
    examples = {name: make for name, make in example_programs().items() if name in EXAMPLES[machine]}
    groups = {group.__name__: group for group in GROUPS[which]}
    made = groups if which == "others" else {**examples, **PROGRAMS, **groups}
    every: list[str] = []
    lacking: set[str] = set()
    with use_machine(described):
        for name, make in made.items():
            try:
                every += [text for func in make() for text in texts(func, machine)]
            except (UnknownLevelError, UsageError):
                lacking.add(name)
    assert lacking == LACKS.get(machine, set())
    for alike in by_headers(renamed(text, number) for number, text in enumerate(every)):
        _compile(joined(alike), target_for(described))


def _compile(text: str, target: dict[str, str]) -> None:
    try:
        code = stock.device_code(text, target)
    except RuntimeError as error:
        found = [line for line in str(error).splitlines() if ": error" in line]
        pytest.fail("\n".join(found[-20:]), pytrace=False)
    assert code
