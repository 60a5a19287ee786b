# SPDX-License-Identifier: MIT
"""Programs taken apart, and their statements by line: what the tests of the analyses share."""

import linecache
from typing import Any

from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program.effects import Effects, ProgramNames, statements
from tilescale.program.model import DevicePhase, Program, location

H200 = Machine.load("h200-sxm-8")


def taken_apart(func: Any) -> Program:
    """A traced function as a program for the machine of the tests."""
    return analyse(func, H200)


def marked(program: Program, mark: str) -> list[tuple[ir.Stmt, bool]]:
    """The statements of the lines that end with `# <mark>`, outermost first, and whether each is in a device phase."""
    found = []
    for stmt, phase, _ in statements(program.body):
        place = location(stmt)
        if place and linecache.getline(place.file, place.line).rstrip().endswith(f"# <{mark}>"):
            found.append((stmt, isinstance(phase, DevicePhase)))
    return found


def effects_at(program: Program, mark: str) -> Effects:
    """The effects of the statement of a marked line, with all inside it."""
    stmt, on_device = marked(program, mark)[0]
    return ProgramNames(program).all_effects(stmt, on_device=on_device)


def text(program: Program, effects: Effects) -> list[str]:
    """Accesses in short: how, "atomic", whose instance, which region: "w X@device[0:8, 4:8]"."""
    names = ProgramNames(program).homes
    found = []
    for access in effects.accesses:
        how = ("r" if access.reads else "") + ("w" if access.writes else "") + ("a" if access.atomic else "")
        whose = "" if access.at is None else f"@{access.at.level}"
        region = ""
        if access.begins is not None and access.extents is not None:
            parts = zip(access.begins, access.extents, strict=True)
            region = ", ".join(str(b) if ir.constant(n) == 1 else f"{b}+{n}" for b, n in parts)
        found.append(f"{how} {names[access.root].name}{whose}[{region}]")
    return found
