# SPDX-License-Identifier: MIT
"""Results that builders of operators' programs declare, so that a dry run does not trace these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale import backends
from tilescale.hda import Machine
from tilescale.ops import ag_columns_gemm, ag_gemm_programs, gemm_ag, gemm_ar, gemm_rs, whole_tensors
from tilescale.ops.block_gemm import block_tiling
from tilescale.ops.gemm_tiles import TILINGS, GemmSpec
from tilescale.passes.mod_analysis import written_parameters
from tilescale.program.builder import ProgramBuilder
from tilescale.runtime import ahead
from tilescale.runtime.compile import compile
from tilescale.runtime.kernel import Kernel

PLAIN = GemmSpec(512, 512, "bfloat16", replace(TILINGS[0], stages=3), True, False)
BIASED = replace(PLAIN, transposed=False, biased=True)
FLOAT8 = replace(PLAIN, dtype="float8_e4m3fn", other="float8_e5m2")
SCALED = replace(FLOAT8, other="", tiles=block_tiling(512), blocks=True)
MACHINE = Machine.load("h200-sxm-8")

BUILT: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((gemm_rs.program, (2, of, blocks)) for of in (PLAIN, BIASED, FLOAT8) for blocks in (0, 132)),
    (gemm_rs.program, (2, SCALED)),
    (gemm_rs.program, (4, PLAIN)),
    *((ag_gemm_programs.program, (2, of, gathers)) for of in (PLAIN, BIASED, SCALED) for gathers in (True, False)),
    (ag_gemm_programs.program, (2, replace(BIASED, tiles=TILINGS[-2], gated=True, activation="silu"), True, 2)),
    *((ag_gemm_programs.program, (2, replace(PLAIN, parts=parts))) for parts in ((256, 256), (256, 128, 128))),
    (ag_gemm_programs.program, (2, FLOAT8, True, 1, 132)),
    *((gemm_ar.program, (2, of, blocks)) for of in (PLAIN, BIASED, FLOAT8) for blocks in (0, 132)),
    *((module.program, (3, of)) for module in (ag_columns_gemm, gemm_ag) for of in (PLAIN, BIASED)),
    (whole_tensors.program, (2, "all_gather", "bfloat16", "direct")),
    (whole_tensors.program, (2, "reduce_scatter", "bfloat16", None, None, "max")),
    (whole_tensors.program, (2, "all_to_all", "uint8", "direct")),
    (whole_tensors.broadcast_program, (2, 1, "direct")),
    (whole_tensors.sum_program, (2, "bfloat16")),
    (whole_tensors.sum_program, (2, "bfloat16", "sum", "two_shot")),
]


def kernel(number: int) -> Kernel:
    return compile(ProgramBuilder(*BUILT[number]), machine=MACHINE, schedule="sequential")


@pytest.mark.parametrize("number", range(len(BUILT)))
def test_declared_results_are_the_first_written_parameters(number: int):
    """Scratch memory of the schedule follows them."""
    made = kernel(number)
    assert made.declared_outputs is not None and made.declaration is not None
    written = sorted(written_parameters(made.program))
    assert written[: len(made.declared_outputs)] == list(made.declared_outputs)
    assert len(made.program.launches) == 1
    grids = made._lowered(backends.generator(MACHINE)).lowered.grids
    assert len(grids) <= made.declaration.grids


def test_a_dry_run_traces_no_declared_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProgramBuilder, "build", lambda own: pytest.fail("traced"))
    made, args = kernel(0), [torch.ones(2) for _ in range(8)]
    with ahead.dry_run() as needed:
        made(*args)
    assert needed.now == [made]
    assert [position for position, x in enumerate(args) if not x.any()] == [5]


def test_a_program_is_found_once_another_process_has_lowered_it(monkeypatch: pytest.MonkeyPatch):
    made, lowered = kernel(0), SimpleNamespace(ahead=lambda options: [SimpleNamespace(is_done=True)])
    found = iter([None, lowered])
    monkeypatch.setattr("tilescale.backends.find", lambda *given: next(found))
    assert not made.is_compiled
    assert made.lower() is made.lower() is lowered and made.is_compiled
