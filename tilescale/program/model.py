# SPDX-License-Identifier: MIT
"""The structure above the grid's TIR, shared by the emulator, the cost model and the lowering.

A program's host-level body is a tree: launches in order, and inside a launch *phases* in order, with serial loops and
branches around them. A device phase runs once on every unit that owns tensors; a grid phase runs the tile program on
the whole grid; the phases of one unit follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.program.layout import Layout
from tilescale.program.ops import MOMENTS


def location(stmt: ir.Stmt, what: str = "") -> Location | None:
    """Location of a statement in the user's program."""
    found = ir.stmt_location(stmt)
    return Location(*found, what) if found else None


def declaration(buffer: ir.Buffer, what: str = "declared") -> Location | None:
    """Location of a buffer's declaration in the user's program."""
    found = ir.buffer_location(buffer)
    return Location(*found, what) if found else None


def names_in(stmt: ir.Stmt) -> dict[ir.Var, ir.PrimExpr]:
    """Values of variables that hold integers in a statement, in program order."""
    return {bind.var: bind.value for bind in ir.instances(stmt, ir.Bind) if str(bind.var.dtype).startswith("int")}


def bytes_of(extents: Iterable[Any], dtype: Any) -> int | None:
    """Bytes of elements of a type; None if an extent is known at launch only."""
    total = 1
    for extent in extents:
        known = ir.constant(extent)
        if known is None:
            return None
        total *= known
    return total * ir.bits(str(dtype)) // 8


@dataclass(frozen=True)
class View:
    """A device-level `T.view` of a parameter: the layout of the global tensor over the units of a level."""

    parameter: ir.Var
    data: ir.Var
    level: str
    layout: Layout
    shape: tuple[ir.PrimExpr, ...]
    where: Location | None


@dataclass(frozen=True)
class Parameter:
    """A parameter of the program.

    Attributes:
        var: the parameter; a scalar's value is bound to it.
        buffer: its declared tensor, None for a scalar.
        shape: the shape that each unit passes: the declared one, or that of its shard.
        views: the device-level views of it.
    """

    var: ir.Var
    buffer: ir.Buffer | None
    shape: tuple[ir.PrimExpr, ...] = ()
    views: tuple[View, ...] = ()

    @property
    def name(self) -> str:
        """The user's name."""
        return self.buffer.name if self.buffer is not None else self.var.name


@dataclass(frozen=True)
class DevicePhase:
    """Statements that each tensor-owning unit executes once."""

    stmt: ir.Stmt


@dataclass(frozen=True)
class GridPhase:
    """Statements that every program of the grid executes."""

    stmt: ir.Stmt


@dataclass(frozen=True)
class Sequence:
    """Parts in order."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Control:
    """A loop, branch or marker around phases: `stmt` is a For, IfThenElse or While, `parts` its bodies."""

    stmt: ir.Stmt
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Launch:
    """One `T.Kernel`.

    Attributes:
        extents: units of each launched level above the program, coarsest first.
        grid: extent of each axis; its first axis runs fastest.
        programs: the variables of the grid's axes.
        threads: extents of a program's threads, x first.
        thread_vars: the variables of thread indices, each with its axis.
        cluster: programs of one cluster along each axis.
        buffers: allocations of a program (or a device, or another level: `owners`), and of the function outside any
            launch.
        owners: data variable -> level whose units own an instance each.
        barriers: data variable of a buffer of barriers -> how many arrivals each of them counts.
        flags: data variables of buffers of flags that are zero when a call begins.
        in_order: whether programs rely on starting in the order of their numbers.
        notes: all annotations of the launch.
        body: the phases.
    """

    extents: tuple[tuple[str, ir.PrimExpr], ...]
    grid: tuple[ir.PrimExpr, ...]
    programs: tuple[ir.Var, ...]
    threads: tuple[int, int, int]
    thread_vars: tuple[tuple[ir.Var, int], ...]
    cluster: tuple[int, int, int]
    buffers: tuple[ir.Buffer, ...]
    owners: tuple[tuple[ir.Var, str], ...]
    barriers: tuple[tuple[ir.Var, tuple[int, ...]], ...]
    flags: tuple[ir.Var, ...]
    in_order: bool
    notes: tuple[tuple[str, Any], ...]
    body: Part
    where: Location | None = None

    @property
    def thread_count(self) -> int:
        """Threads of one program."""
        x, y, z = self.threads
        return x * y * z

    @property
    def cluster_size(self) -> int:
        """Programs of one cluster."""
        x, y, z = self.cluster
        return x * y * z


Part = DevicePhase | GridPhase | Sequence | Control | Launch


@dataclass(frozen=True)
class Program:
    """A traced function, taken apart.

    Attributes:
        func: the function that it was made of; `body` has the statements as changed by passes.
        is_hierarchical: whether it uses anything that stock TileLang does not have.
    """

    name: str
    func: ir.PrimFunc = field(compare=False)
    parameters: tuple[Parameter, ...]
    body: Part
    is_hierarchical: bool

    @property
    def moments(self) -> int:
        """Moments of waits and signals that each block records."""
        attrs = self.func.attrs
        return int(attrs[MOMENTS]) if attrs and MOMENTS in attrs else 0

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(_launches(self.body))

    @cached_property
    def names(self) -> dict[ir.Var, ir.PrimExpr]:
        """Values of variables that hold integers, in program order."""
        return names_in(self.func.body)

    @cached_property
    def workspace_names(self) -> dict[ir.Var, str]:
        """The name of each allocation, unique in the program: launches may name theirs alike."""
        found: dict[ir.Var, str] = {}
        for launch in self.launches:
            for buffer in launch.buffers:
                alike = sum(name.split(".")[0] == buffer.name for name in found.values())
                found.setdefault(buffer.data, f"{buffer.name}.{alike}" if alike else buffer.name)
        return found

    @property
    def extents(self) -> tuple[tuple[str, ir.PrimExpr], ...]:
        """Units of each launched level above the program, coarsest first; the same for all launches."""
        return self.launches[0].extents


def _launches(part: Part) -> Iterator[Launch]:
    if isinstance(part, Launch):
        yield part
    elif isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _launches(inner)
