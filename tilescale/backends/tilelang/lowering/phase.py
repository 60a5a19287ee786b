# SPDX-License-Identifier: MIT
"""A grid phase between stages: the record that one stage passes to the next, and a stage at work on it.

`stages.py` has the order. A stage gets a `Phase` and returns another one; nothing else passes between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import KernelParameters
from tilescale.backends.tilelang.lowering.deferred_stores import DeferredSignal
from tilescale.backends.tilelang.lowering.role_graph.graph import RoleGraph
from tilescale.cost.choose import MechanismChoice
from tilescale.cost.operations import copy_choice
from tilescale.cost.reach import linked
from tilescale.errors import Location, UnsupportedError
from tilescale.hda import Machine
from tilescale.program.mesh import Mesh
from tilescale.program.model import Launch, Program, names_in


@dataclass(frozen=True)
class LoweringTarget:
    """The target of a lowering.

    Attributes:
        sizes: units of each launched level above the program, coarsest first.
        stride: bytes between two devices' instances in the heap's address range.
        headers: package with the device functions of the instruction set.
        nccl: whether NCCL can join the devices; it rejects two ranks on one.
        nvshmem: whether the heap is NVSHMEM's, so that programs can call it.
        messages: whether the device functions of messages exist for the instruction set.
        mapped: devices that have addresses for each other's memory, where the job has more of them than `near`.
    """

    machine: Machine
    sizes: tuple[tuple[str, int], ...]
    stride: int
    headers: str
    nccl: bool = True
    nvshmem: bool = False
    messages: bool = True
    mapped: int = 0

    @property
    def devices(self) -> int:
        """Number of tensor-owning units."""
        return self.mesh.size

    @cached_property
    def mesh(self) -> Mesh:
        """Coordinates of these units."""
        return Mesh(self.sizes)

    @cached_property
    def group_size(self) -> int:
        """Number of consecutive devices with addresses for each other's memory, by the machine model."""
        return linked(self.machine, self.sizes)

    @property
    def slots(self) -> int:
        """Number of consecutive devices whose instances of a tensor lie next to each other for a program."""
        return self.mapped or self.group_size

    def with_mapped(self, devices: int) -> LoweringTarget:
        """The target of a job in which `devices` devices have addresses for each other's memory."""
        return self if devices == self.slots else replace(self, mapped=devices)


@dataclass(frozen=True)
class ThreadGroups:
    """Properties of the units inside a program, for later stages.

    Attributes:
        reducing: threads of the largest unit that reduces across its warps concurrently with siblings; 0 without.
        tiles: data variable of a tile that each unit has for itself -> a description.
        arrays: names of the units' parts of the same tile in registers.
    """

    reducing: int = 0
    tiles: Mapping[ir.Var, str] = field(default_factory=dict)
    arrays: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RolePhase:
    """A phase with role assignment.

    Attributes:
        stmt: the phase, with waits moved to the statements that they gate.
        graph: its roles and channels, if stock TileLang creates them.
        elects: whether the same thread issues all bulk stores.
        kept: signals deferred to the next iteration of the enclosing loop, by number.
        tiles: on-chip allocations in addition to the program's tiles.
        early: whether the consumers load registers before the loop; TileLang's producer would, too.
        notes: for messages.
    """

    stmt: ir.Stmt = field(default_factory=lambda: tir.sequence([]))
    graph: RoleGraph = RoleGraph()
    elects: bool = False
    kept: tuple[DeferredSignal, ...] = ()
    tiles: tuple[ir.Buffer, ...] = ()
    early: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def declined(cls, stmt: ir.Stmt, reason: str) -> RolePhase:
        return cls(stmt, notes=(f"T.Pipelined without a producer: {reason}",))


@dataclass(frozen=True)
class Phase:
    """A grid phase of a launch.

    Attributes:
        number: number of the phase in its program.
        stmt: the statements of its programs.
        first_site: number of its first wait or signal.
        around: host variables among its arguments: those of enclosing loops, and extents.
        tiles: on-chip allocations in addition to the program's tiles.
        arrivals: data variable of a barrier in shared memory -> the arrivals of each.
        headers: files of device functions that it calls, in addition to sync.cuh.
        text: additional text before the kernel.
        notes: chosen implementations, and reasons against others, for messages.
        ordered: whether branches on threads, or the order of its statements, rule out TileLang's own producers.
        groups: the units inside its programs, if it has any.
        graph: the roles of its threads, and the channels between them.
        roles: its role assignment, with deferred stores.
        window: number of workspace slots that programs share; None if each has its own.
        signature: the kernel's parameters, once the stage of devices has collected them.
    """

    program: Program
    launch: Launch
    target: LoweringTarget
    number: int
    stmt: ir.Stmt
    first_site: int = 0
    around: tuple[ir.Var, ...] = ()
    tiles: tuple[ir.Buffer, ...] = ()
    arrivals: Mapping[ir.Var, list[ir.PrimExpr]] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    text: str = ""
    notes: tuple[str, ...] = ()
    ordered: bool = False
    groups: ThreadGroups | None = None
    graph: RoleGraph = RoleGraph()
    roles: RolePhase = field(default_factory=RolePhase)
    window: int | None = None
    signature: KernelParameters | None = None

    @cached_property
    def sizes(self) -> dict[ir.Var, ir.PrimExpr]:
        """The program's variables for numbers of units, and their values."""
        pairs = zip(self.launch.extents, self.target.sizes, strict=True)
        return {var: ir.IntImm("int32", n) for (_, var), (_, n) in pairs if isinstance(var, ir.Var)}

    def sized(self, node: ir.Node) -> Any:
        """A statement or expression with numbers of units filled in for the launch."""
        return ir.substitute(node, self.sizes) if self.sizes and isinstance(node, ir.PrimExpr | ir.Stmt) else node

    @cached_property
    def names(self) -> dict[ir.Var, ir.PrimExpr]:
        """Values of variables that hold integers: those of the program, and those of its statements, renamed or not."""
        return {**self.program.names, **names_in(self.stmt)}

    @cached_property
    def parameters_of_views(self) -> dict[ir.Var, ir.Var]:
        """Data variable of a device's view of a tensor -> that of the parameter it views."""
        parameters = [(p.buffer, p.views) for p in self.program.parameters]
        return {view.data: buffer.data for buffer, views in parameters if buffer is not None for view in views}

    def choice(self, call: ir.Call) -> MechanismChoice:
        """The mechanism of a copy of tiles, by the machine model. Raises UnsupportedError without one."""
        machine, grid = self.target.machine, ir.constants(map(self.sized, self.launch.grid))
        units = machine.program_units
        programs = units if grid is None else min(units, math.prod(grid))
        return copy_choice(call, machine, dict(self.target.sizes), programs, names=self.names)


class Stage:
    """A stage at work on a phase.

    Attributes:
        phase: the phase before the stage.
        tiles, notes, arrivals: additions of the stage to the phase's.
        where: the current line.
    """

    def __init__(self, phase: Phase):
        self.phase = phase
        self.program, self.launch, self.target = phase.program, phase.launch, phase.target
        self.tiles: list[ir.Buffer] = []
        self.notes: list[str] = []
        self.arrivals: dict[ir.Var, list[ir.PrimExpr]] = {}
        self.where: Location | None = phase.launch.where
        self._numbers = -1

    def unsupported(self, found: str, hint: str = "run it with tilescale.emulate") -> UnsupportedError:
        """The error for an unsupported construct, at the current line."""
        return UnsupportedError(found, hint=hint, where=self.where)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def mbarrier(self, name: str, arrivals: list[int], *, remote: bool = False) -> ir.Buffer:
        """mbarriers, each with its number of arrivals; `remote` if other programs of the cluster arrive too."""
        scope = "shared.cluster_barrier" if remote else "shared.barrier"
        made = tir.local_buffer(name, [len(arrivals)], "uint64", scope)
        self.tiles.append(made)
        self.arrivals[made.data] = [ir.int_node(n) for n in arrivals]
        return made

    def done(self, stmt: ir.Stmt, **changes: Any) -> Phase:
        """The phase after the stage: its statements, the stage's additions, and other changes."""
        tiles, notes = (*self.phase.tiles, *self.tiles), (*self.phase.notes, *self.notes)
        arrivals = {**self.phase.arrivals, **self.arrivals}
        return replace(self.phase, stmt=stmt, tiles=tiles, notes=notes, arrivals=arrivals, **changes)
