# SPDX-License-Identifier: MIT
"""Text of a phase after each stage of the lowering: from TIR to TIR."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import cluster_programs, gated_programs, overlap_programs, programs
from tests.cuda.support import program
from tests.language import programs as reference
from tilescale.backends.base import Target as AnyTarget
from tilescale.backends.cuda import support
from tilescale.backends.tilelang.lowering import copies, implemented, kernel, registry, stages
from tilescale.backends.tilelang.lowering.clusters import stage as clusters
from tilescale.backends.tilelang.lowering.groups import barriers
from tilescale.backends.tilelang.lowering.groups import stage as groups
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.role_graph import split
from tilescale.backends.tilelang.lowering.role_graph import stage as roles
from tilescale.hda import Machine
from tilescale.program import ops
from tilescale.program.model import GridPhase, Sequence

GOLDEN = Path(__file__).parents[1] / "golden" / "stages"

PROGRAMS: dict[str, Callable[[], Any]] = {
    "cluster": cluster_programs.product,
    "put_with_signal": lambda: programs.put_with_signal(impl="tma"),
    "sender_loop": lambda: overlap_programs.put(rows=1024, columns=1024, blocks=8),
    "persistent_gemm_storing": lambda: overlap_programs.rs_gemm(
        shape=(2048, 512, 512), direct=True, stages=2, blocks=12
    ),
    "waiting_gemm": lambda: overlap_programs.ag_gemm(shape=(2048, 512, 512)),
    "waiting_warpgroups": lambda: gated_programs.arriving("each step and in front", devices=2),
    "pulling_warpgroups": lambda: gated_programs.arriving("between loads", devices=2, pulls=True),
    "warpgroups": lambda: reference.tensor_parallel_gemm(4, 128, 128, 512),
}

STAGES: dict[str, Callable[[Phase], Phase]] = {
    "clusters": clusters.lower,
    "groups": groups.lower,
    "roles": roles.proposed,
    "devices": lambda phase: stages.devices(phase, None),
    "barriers": barriers.lower,
    "split": split.lower,
}


def begun(func: Any) -> Phase:
    """The first grid phase of a program."""
    taken_apart, machine = program(func), Machine.load("h200-sxm-8")
    lowered = support.lower(taken_apart, AnyTarget.of(taken_apart, machine)).lowered
    launch = taken_apart.launches[0]
    parts = launch.body.parts if isinstance(launch.body, Sequence) else [launch.body]
    grid = next(part for part in parts if isinstance(part, GridPhase))
    return stages.begun(Phase(taken_apart, launch, lowered.target, 0, grid.stmt))


def texts(phase: Phase) -> list[str]:
    """The statements before all stages, and after each that changes them; in the end what the kernel takes."""
    found = ["# the program", phase.stmt.script()]
    for name, stage in STAGES.items():
        before, phase = phase.stmt.script(), stage(phase)
        after = phase.stmt.script()
        found += [f"# after {name}", "(the same)" if after == before else after]
    made = kernel.lower(phase)
    names = [made.func.buffer_map[p].name if p in made.func.buffer_map else p.name for p in made.func.params]
    took = [f"{name}: {argument}" for name, argument in zip(names, made.arguments, strict=True)]
    return [*found, "# the role graph", *phase.graph.lines(), "# the kernel takes", *took, ""]


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_after_each_stage(name: str, golden):
    golden(f"stages/{name}", "\n".join(texts(begun(PROGRAMS[name]()))))


def test_every_golden_text_has_its_program():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == PROGRAMS.keys()


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_has_a_text_that_it_changes(name: str):
    found = [path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")]
    assert not all(f"# after {name}\n(the same)\n" in text for text in found)


def test_nobody_walks_the_function_once_it_is_taken_apart():
    """Actions of a program are asked of its phases and their effects."""
    code = Path(stages.__file__).parents[3]
    wrong = [path for path in code.rglob("*.py") if "program.func.body" in path.read_text(encoding="utf-8")]
    assert code.name == "tilescale" and not wrong


@pytest.mark.parametrize("name", PROGRAMS)
def test_stages_leave_their_input_as_it_is(name: str):
    """A stage is a pure function of the phase: no state is kept between phases, no phase is changed in place."""
    phase = begun(PROGRAMS[name]())
    for stage in STAGES.values():
        before = phase.stmt.script()
        once, again = stage(phase), stage(phase)
        assert once.stmt.script() == again.stmt.script()
        assert (once.notes, len(once.tiles)) == (again.notes, len(again.tiles))
        assert phase.stmt.script() == before
        phase = once


@pytest.mark.parametrize(
    ("kind", "form"), [("unit", "tiles"), ("program", "programs"), ("thread_group", "thread groups")]
)
@pytest.mark.parametrize("name", implemented.ON_TILES["tiles"])
def test_collectives_on_tiles_are_lowered_as_they_are_chosen(name: str, kind: str, form: str):
    # One rule makes both all-reduces of a cluster, in two shots and, with a user's function, in one.
    wanted = None if (name, form) == ("allreduce", "programs") else implemented.ON_TILES[form][name]
    between_nodes = {implemented.BETWEEN} if form == "tiles" else set()
    assert implementations(f"tilescale.{name}", kind) == {wanted} | between_nodes


def implementations(name: str, kind: str) -> set[str | None]:
    """The mechanisms or implementations that an operation has rules for; None is one for all of them."""
    copies.register()
    return {impl for of, of_kind, impl in registry._RULES if (of, of_kind) == (name, kind)}


def test_each_mechanism_of_copies_has_one_rule():
    found = {kind: implementations(ops.COPY.name, kind) for kind in ("unit", "program", "thread_group")}
    assert found == {"unit": {"tma", "lsu", "nvshmem"}, "program": {"dsmem"}, "thread_group": {None}}
    with pytest.raises(AssertionError, match="two rules"):
        lowers(ops.COPY.name, "unit", "tma")(print)
