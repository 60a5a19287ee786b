# SPDX-License-Identifier: MIT
"""Rewritten programs of experts, as source text."""

from pathlib import Path
from typing import Any

import pytest

from tests.ladder import NUMBERED, load
from tests.overlap.support import H200, overlapped
from tilescale.passes.structure import structure
from tilescale.program.source import source_of


def with_capacity() -> Any:
    return overlapped(load(NUMBERED[24]).with_capacity(4, 2, 64, 128, 64), chunk=32)[0]


def by_offsets() -> Any:
    return overlapped(load(NUMBERED[24]).by_offsets(4, 2, 64, 64, 64), chunk=32, kept=("begins",))[0]


PROGRAMS = {made.__name__: made for made in (with_capacity, by_offsets)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_of_overlapped_programs(name: str, golden):
    golden(f"overlap/{name}", source_of(structure(PROGRAMS[name](), H200), H200))


def test_every_golden_text_has_its_program():
    assert {path.stem for path in (Path(__file__).parent / "overlap").glob("*.txt")} == PROGRAMS.keys()
