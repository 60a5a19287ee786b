# SPDX-License-Identifier: MIT
"""Values of `impl=`: each runs as the named algorithm, in the emulator and in generated code, or is rejected with its
line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilescale
from tests.collectives.programs import SHAPES, UNITS, arguments, program, results, shapes, wanted
from tests.cuda.support import lowered, of_nvshmem
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.implemented import BETWEEN, IMPLEMENTED, ON_TENSORS
from tilescale.collectives import FORMS, TENSORS, TILES, names, records
from tilescale.collectives.table import family
from tilescale.errors import UnsupportedError, UsageError

BETWEEN_GROUPS = {(TENSORS, BETWEEN), (TILES, BETWEEN)}
"""Algorithms generated only where devices do not all share memory; here they do."""

every_kind = pytest.mark.parametrize(
    ("form", "operation"), [(form, operation) for form in FORMS for operation in SHAPES if names(operation, form)]
)

units_and_types = pytest.mark.parametrize(("units", "dtype"), [(UNITS, "float32"), (3, "int8")])
"""A power of two, and another number with elements of a byte."""


def sources(
    operation: str, dtype: torch.dtype = torch.float32, seed: int = 0, units: int = UNITS
) -> list[torch.Tensor]:
    """Small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    shape = shapes(operation, units)[0]
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(units)]


@every_kind
@units_and_types
def test_what_is_accepted_is_emulated_as_it_is_named(form: str, operation: str, units: int, dtype: str):
    for name in able(operation, form, units):
        given = sources(operation, getattr(torch, dtype), units=units)
        args = arguments(form, operation, given)
        report = tilescale.emulate(program(operation, form, name, dtype, units=units), args)
        for found, expected in zip(results(form, args), wanted(operation, given), strict=True):
            assert torch.equal(found, expected), name
        spans = {span.name for span in report.timeline.spans if span.kind == "collective"}
        assert spans == {f"{operation} ({name})"}


def able(operation: str, form: str, units: int) -> list[str]:
    """Algorithms that a number of units may name."""
    return [name for name in names(operation, form) if records()[name].against(units) is None]


@every_kind
@units_and_types
def test_what_is_accepted_is_generated_as_it_is_named_or_refused(
    form: str, operation: str, units: int, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    of_nvshmem(monkeypatch)
    for name in able(operation, form, units):
        traced = program(operation, form, name, dtype, units=units)
        if (operation, form, name) not in IMPLEMENTED or (form, name) in BETWEEN_GROUPS:
            with pytest.raises(UnsupportedError, match=f"impl='{name}' of T.{operation}: available here:") as refused:
                lowered(traced)
            assert refused.value.where and "programs.py" in refused.value.where[0].file
            continue
        made = lowered(traced)
        if form == TENSORS:
            steps = [step.impl for step in host_steps(made.lowered.body) if step.impl]
            assert steps == ([] if ON_TENSORS[operation, name][0].on_tiles else [name])
            assert f"T.{operation} of Y" in made.notes[0] or f"T.{operation} of X" in made.notes[0]
        noted = f": {name} (asked for)" if form == TENSORS else f"{name} through" if form == TILES else "shared memory"
        assert [note for note in made.notes if noted in note], made.notes


NODES = """
extends: h200-sxm-8x4
title: two nodes of two GPUs
levels:
  node:
    count: 2
  device:
    count: 2
"""


@pytest.fixture
def nodes(tmp_path: Path) -> str:
    """The description of two nodes of two devices."""
    described = tmp_path / "nodes.yaml"
    described.write_text(NODES, encoding="utf-8")
    return str(described)


@pytest.mark.parametrize("operation", SHAPES)
def test_between_nodes_what_is_accepted_runs_as_it_is_named_or_is_refused(operation: str, nodes: str):
    """Of whole tensors, emulated and generated, where half of the devices do not share memory with the others."""
    generated = set()
    with tilescale.use_machine(nodes):
        for name in names(operation, TENSORS):
            traced, given = program.__wrapped__(operation, TENSORS, name), sources(operation)
            try:
                made = lowered(traced, nodes)
            except UnsupportedError as refused:
                assert f"impl='{name}' of T.{operation}: available here: " in str(refused) and refused.where
            else:
                generated.add(name)
                assert [step.impl for step in host_steps(made.lowered.body) if step.impl] == [name]
            args = arguments(TENSORS, operation, given)
            report = tilescale.emulate(traced, args)
            for found, expected in zip(results(TENSORS, args), wanted(operation, given), strict=True):
                assert torch.equal(found, expected), name
            spans = {span.name for span in report.timeline.spans if span.kind == "collective"}
            assert spans == {f"{operation} ({name})"}
    assert generated == {BETWEEN, "nccl"} & {*names(operation, TENSORS)}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16"])
@pytest.mark.parametrize("operation", SHAPES)
def test_between_nodes_all_types_are_moved_and_known_ones_combined(operation: str, dtype: str, nodes: str):
    for name in (None, *({BETWEEN, "nccl"} & {*names(operation, TENSORS)})):
        with tilescale.use_machine(nodes):
            traced = program.__wrapped__(operation, TENSORS, name, dtype)
            if operation not in ("allreduce", "reduce_scatter"):
                chosen = name or ("nccl" if operation == "all_to_all_v" else BETWEEN)
                assert f": {chosen} (" in lowered(traced, nodes).notes[0]
                given = [x.abs().to(getattr(torch, dtype)) for x in sources(operation)]
                args = arguments(TENSORS, operation, given)
                tilescale.emulate(traced, args, progress=False)
                for found, expected in zip(results(TENSORS, args), wanted(operation, given), strict=True):
                    assert torch.equal(found.float(), expected.float())
            else:
                with pytest.raises(UnsupportedError, match=f"float64 are combined, not {dtype}") as refused:
                    lowered(traced, nodes)
                assert refused.value.where and refused.value.hint


def host_steps(part: object) -> list[HostStep]:
    if isinstance(part, HostStep):
        return [part]
    inner = [part.body] if hasattr(part, "body") else getattr(part, "parts", ())
    return [step for each in inner for step in host_steps(each)]


@every_kind
def test_anything_else_is_an_error_that_lists_what_there_is(form: str, operation: str):
    others = {*records(), "magic"} - {*names(operation, form)}
    for name in sorted(others):
        with pytest.raises(UsageError, match=re.escape(f"impl={name!r}: T.{operation} at level")) as error:
            program(operation, form, name)
        assert ", ".join(names(operation, form)) in str(error.value) and error.value.where


@pytest.mark.parametrize(
    ("operation", "name", "dtype", "op", "units", "reason"),
    [
        ("allreduce", "nccl", "float8_e4m3fn", "sum", 4, "it takes no float8_e4m3fn"),
        ("all_gather", "doubling", "float32", "sum", 3, "it needs a power of two of units, here are 3"),
        ("reduce_scatter", "halving", "float32", "sum", 3, "it needs a power of two of units, here are 3"),
    ],
)
def test_who_cannot_says_why_and_lists_the_others(
    operation: str, name: str, dtype: str, op: str, units: int, reason: str
):
    refused = program(operation, TENSORS, name, dtype, op, units)
    for run in (lambda: tilescale.emulate(refused, data=False, progress=False), lambda: lowered(refused)):
        with pytest.raises(UnsupportedError) as found:
            run()
        message = found.value.message
        assert message.startswith(f"impl={name!r} of T.{operation}: {reason}; available here: ")
        others = message.partition("available here: ")[2].split(", ")
        assert name not in others and len(others) > 1 and found.value.hint and found.value.where


@pytest.mark.parametrize(
    ("form", "operation"), [(form, of) for form in (TENSORS, TILES) for of in SHAPES if names(of, form)]
)
def test_both_choose_alike(form: str, operation: str):
    """Without `impl=` the emulator of a machine that CUDA supports takes what CUDA takes."""
    traced = program(operation, form)
    report = tilescale.emulate(traced, arguments(form, operation, sources(operation)))
    (span,) = {span.name for span in report.timeline.spans if span.kind == "collective"}
    chosen = re.fullmatch(rf"{operation} \((\w+)\)", span)[1]
    assert [note for note in lowered(traced).notes if re.search(rf": {chosen} (\(|through)", note)]


def test_every_implementation_has_its_record():
    for operation, form, name in IMPLEMENTED:
        assert records()[name].supports(operation, form)


# -- bits --------------------------------------------------------------------------------------------------------------


def summed(name: str, form: str = TENSORS, seed: int = 1) -> list[torch.Tensor]:
    """Each unit's sum of narrow floats that do not add up exactly."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(SHAPES["allreduce"][0], generator=generator).bfloat16() for _ in range(UNITS)]
    args = arguments(form, "allreduce", given)
    tilescale.emulate(program("allreduce", form, name, "bfloat16"), args)
    return [torch.stack(given), *results(form, args)]


@pytest.mark.parametrize("name", names("allreduce", TENSORS))
def test_all_units_get_the_same_bits(name: str):
    _, first, *others = summed(name)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_sums_in_the_order_of_ranks_round_once(name: str):
    given, found, *_ = summed(name)
    total = given[0].float()
    for other in given[1:]:
        total = total + other.float()
    assert torch.equal(found, total.bfloat16())


def test_a_ring_passes_rounded_sums_on():
    """The part of unit r begins at the unit after it, and is rounded at every one that it passes."""
    given, found, *_ = summed("ring")
    expected = []
    for part in range(UNITS):
        order = [(part + 1 + step) % UNITS for step in range(UNITS)]
        parts = [given[unit].chunk(UNITS)[part].float() for unit in order]
        total = parts[0]
        for mine in parts[1:]:
            total = (total + mine).bfloat16().float()
        expected.append(total.bfloat16())
    assert torch.equal(found, torch.cat(expected))


# -- a new algorithm ---------------------------------------------------------------------------------------------------

STAR = """
import numpy as np

from tilescale.collectives.record import TENSORS, Algorithm
from tilescale.collectives.round_schedule import Round, RoundSchedule


def allreduce(shape):
    units = int(np.prod(shape))
    others = np.arange(1, units)
    rounds = Round.of(others, 0, combine=True), Round.of(np.zeros_like(others), others)
    return RoundSchedule("allreduce", units, 1, rounds)


ALGORITHMS = (
    Algorithm(name="star", title="All send to unit 0, which sends back.", schedules={"allreduce": allreduce},
              forms=(TENSORS,)),
)
"""


@pytest.fixture
def a_file_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with one more algorithm next to the project's."""
    (tmp_path / "star.py").write_text(STAR, encoding="utf-8")
    monkeypatch.setattr(family, "__path__", [*family.__path__, str(tmp_path)])
    records.cache_clear()
    yield
    records.cache_clear()
    for name in ("star", "star_again"):
        sys.modules.pop(f"{family.__name__}.{name}", None)


def test_a_new_algorithm_is_a_file(a_file_more: None):
    given = sources("allreduce")
    args = arguments(TENSORS, "allreduce", given)
    report = tilescale.emulate(program("allreduce", TENSORS, "star"), args)
    for found, expected in zip(results(TENSORS, args), wanted("allreduce", given), strict=True):
        assert torch.equal(found, expected)
    assert "allreduce (star)" in {span.name for span in report.timeline.spans}
    with pytest.raises(UsageError, match="star"):
        program("allreduce", TENSORS, "magic")


LOWERED = """
import sys
from tilescale.collectives.table import family
family.__path__.append(sys.argv[1])  # before any back end has asked for algorithms, as a file among the others is

from tests.collectives.programs import TENSORS, program
from tests.collectives.test_accepted import host_steps
from tests.cuda.support import lowered
from tilescale.backends.cuda.running.collectives import LAUNCHERS

made = lowered(program("allreduce", TENSORS, "star"))
steps = [step.impl for step in host_steps(made.lowered.body) if step.impl]
print(*made.notes, steps, ("allreduce", "star") in LAUNCHERS)
"""


def test_a_kernel_plays_the_rounds_of_a_new_algorithm(tmp_path: Path):
    (tmp_path / "star.py").write_text(STAR, encoding="utf-8")
    asked = [sys.executable, "-c", LOWERED, str(tmp_path)]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "T.allreduce of Y between devices: star (asked for) ['star'] True", found.stderr


def test_two_algorithms_of_one_name_are_an_error(a_file_more: None, tmp_path: Path):
    (tmp_path / "star_again.py").write_text(STAR, encoding="utf-8")
    with pytest.raises(ValueError, match="two algorithms are called star"):
        records()
