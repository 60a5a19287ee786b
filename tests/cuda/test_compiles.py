# SPDX-License-Identifier: MIT
"""What is generated compiles: every example's program and the small ones, for each architecture, in one file."""

import itertools
import re
import shutil

import pytest

from tests.cuda import cluster_programs, programs
from tests.cuda.support import KERNEL, example_programs, source
from tilelang_core import compile as stock
from tilescale.backends.cuda.target import target_for
from tilescale.errors import UnknownLevelError, UsageError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.ops import grouped_gemm, row_exchange

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

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


@pytest.mark.parametrize("machine", EXAMPLES)
def test_text_compiles(machine: str):
    described = Machine.load(machine)
    examples = {name: make for name, make in example_programs().items() if name in EXAMPLES[machine]}
    texts: list[str] = []
    lacking: set[str] = set()
    with use_machine(described):
        for name, make in {**examples, **PROGRAMS}.items():
            try:
                texts += [source(func, machine) for func in make()]
            except (UnknownLevelError, UsageError):
                lacking.add(name)
    assert lacking == LACKS.get(machine, set())
    _compile("\n".join(_apart(text, number) for number, text in enumerate(texts)), target_for(described))


@pytest.mark.parametrize("machine", ["h200-sxm-8", "b200-sxm-8"])
def test_clusters_compile(machine: str):
    described = Machine.load(machine)
    with use_machine(described):
        made = [
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
        texts = [source(func, machine) for func in made]
    _compile("\n".join(_apart(text, number) for number, text in enumerate(texts)), target_for(described))


def test_operators_compile():
    """Those whose blocks move data, or multiply, by tables."""
    made = [
        row_exchange.scatter_program(2, 3584, 8),
        row_exchange.sum_program(4, 512, 2, "bfloat16", 8, True),
        grouped_gemm.scaled_program(512, 512, 528, "float8_e4m3fn"),
    ]
    texts = [_apart(source(func), number) for number, func in enumerate(made)]
    _compile("\n".join(texts), target_for(Machine.load("h200-sxm-8")))


def _apart(text: str, number: int) -> str:
    """A text whose kernels and shared arrays have other names than those of other texts in the same file."""
    text = re.sub(r"\b(\w+_kernel)\(", rf"program{number}_\1(", text)
    counted = itertools.count()

    def own_array(found: re.Match[str]) -> str:
        array = re.search(r"extern __shared__ .*?(\w+)\[\];", found[0])
        own = f"shared{number}_{next(counted)}"
        return re.sub(rf"\b{array[1]}\b", own, found[0]) if array else found[0]

    return KERNEL.sub(own_array, text)


def _compile(text: str, target: dict[str, str]) -> None:
    try:
        code = stock.device_code(text, target)
    except RuntimeError as error:
        found = [line for line in str(error).splitlines() if ": error" in line]
        pytest.fail("\n".join(found[-20:]), pytrace=False)
    assert code
