# SPDX-License-Identifier: MIT
"""The IR and the phases of the reference programs."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.language import programs
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.model import Control, DevicePhase, Launch, Part, Sequence

PROGRAMS = {
    "tensor_parallel_gemm": lambda: programs.tensor_parallel_gemm(4, 256, 128, 512),
    "mla_gather": lambda: programs.context_parallel_mla(4, 2, 32, 256, 64, 32, 16, 32),
    "mla_copy": lambda: programs.context_parallel_mla(4, 2, 32, 256, 64, 32, 16, 32, programs.exchanged),
    "ring_shift": programs.ring_shift,
    "cluster_sum": programs.cluster_sum,
    "power_iteration": programs.power_iteration,
}


def outline(part: Part, depth: int = 0) -> list[str]:
    """The tree of phases, one line each."""
    indent = "  " * depth
    if isinstance(part, Sequence):
        return [line for inner in part.parts for line in outline(inner, depth)]
    if isinstance(part, Control):
        inside = [outline(inner, depth + 1) for inner in part.parts]
        return [f"{indent}{type(part.stmt).__name__}", *(line for lines in inside for line in lines)]
    if isinstance(part, Launch):
        units = "".join(f" {name}={extent}" for name, extent in part.extents)
        return [
            f"{indent}launch{units} grid={list(map(str, part.grid))} threads={part.threads}",
            *outline(part.body, depth + 1),
        ]
    return [f"{indent}{'device' if isinstance(part, DevicePhase) else 'grid'} phase"]


def text(func: Any) -> str:
    program = analyse(func, Machine.load("h200-sxm-8"))
    script = re.sub(r'("tilescale.machine": )"\w+"', r'\1"..."', func.script())
    return "\n".join([*outline(program.body), "", script, ""])


@pytest.mark.parametrize("name", PROGRAMS)
def test_ir_of_reference_programs(name: str, golden):
    golden(name, text(PROGRAMS[name]()))


def test_every_golden_text_has_its_program():
    assert {path.stem for path in Path(__file__).parent.glob("*.txt")} == PROGRAMS.keys()
