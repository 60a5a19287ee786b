# SPDX-License-Identifier: MIT
"""One rank of a run makes the program of a builder, the others read it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared_programs import share
from tilescale.comm import Team
from tilescale.hda import Machine
from tilescale.ops import whole_tensors
from tilescale.program.builder import ProgramBuilder
from tilescale.runtime.bound_program import BoundProgram


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[ProgramBuilder]]:
    """The builders whose programs are traced, in a rank that shares programs."""
    found: list[ProgramBuilder] = []
    build, make = ProgramBuilder.build, BoundProgram.program.func
    monkeypatch.setattr(ProgramBuilder, "build", lambda own: found.append(own) or build(own))
    monkeypatch.setenv("RANK", "0")
    share(tmp_path)
    yield found
    BoundProgram.program.func = make


def bound(dtype: str = "bfloat16", schedule: str = "sequential") -> BoundProgram:
    builder = ProgramBuilder(whole_tensors.sum_program, (2, dtype))
    return BoundProgram(builder, Machine.load("h200-sxm-8"), {"team": Team(ranks=(0, 1), rank=0)}, schedule)


def test_a_program_is_made_once(built: list[ProgramBuilder]):
    first, second = bound(), bound()
    assert str(first.program.func.script()) == str(second.program.func.script())
    assert first.program.parameters[0].buffer is not second.program.parameters[0].buffer
    assert second._scheduled[0].same_as(second.program.func) and len(built) == 1


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"schedule": "overlap"}])
def test_another_program_is_made(other: dict[str, str], built: list[ProgramBuilder]):
    assert bound().program is not bound(**other).program and len(built) == 2


def test_other_processes_make_their_own(built: list[ProgramBuilder], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK")
    assert bound().program is not bound().program and len(built) == 2
