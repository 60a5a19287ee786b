# SPDX-License-Identifier: MIT
"""The stage of devices: operations between devices become calls of the prelude on memory of all of them.

Why: a remote tile copy is a plain tile copy once a tensor has a rank dimension, so the stock compiler does the rest.
Before: a phase with `T.Scale` of devices, ranks, views, remote copies, signals, waits and collectives. After: the same
with a hidden scalar for each rank, a second parameter `(devices, *shape)` for each tensor reached on peers, and calls
of device functions (headers/sync.cuh) for synchronization. Declines operations without a rule, with an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import CallerArgument, HostVariable, KernelParameters
from tilescale.backends.tilelang.lowering.implemented import ON_TILES
from tilescale.backends.tilelang.lowering.markers import (
    ExecutingThreads,
    acquired,
    by_nvshmem,
    executed,
    one_thread,
    sync,
)
from tilescale.backends.tilelang.lowering.operands import READING, read_before
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.registry import rule_for
from tilescale.backends.tilelang.lowering.signature import Signature
from tilescale.backends.tilelang.nvshmem_link import IMPL, declarations
from tilescale.collectives import TILES
from tilescale.cost.choose import MechanismChoice
from tilescale.errors import UnsupportedError
from tilescale.hda import Level
from tilescale.passes.mod_analysis import device_flags
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.operations import Collective, Rank

UNIT = "unit"
"""The kind of levels whose operations this stage lowers: tensor-owning ones."""

VALUE = "value"
"""Used instead of a kind: operations that are values, whose operands are lowered already."""


class DeviceStage(Signature):
    """The stage at work: the walk over the statements of a phase, and its interface to rules.

    Attributes:
        executing: the unit inside the program whose statements are being lowered; None for the program.
        headers: files of device functions that it calls, in addition to sync.cuh.
        libraries: names of device libraries that it calls, with the text that declares them.
        ordered: whether all threads of a program must synchronize for a call.
        in_parallel: whether each element of a parallel loop executes the current statement.
        is_complete: whether all writes that the current statement publishes are complete.
        begins: statements before all others.
    """

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.roles = phase.roles
        self.executing: ExecutingThreads | None = None
        self.headers: list[str] = []
        self.libraries: dict[str, str] = {}
        self.ordered = self.is_complete = self.in_parallel = False
        self.begins: list[ir.Stmt] = []
        self._scalars = {p.var: i for i, p in enumerate(self.program.parameters) if p.buffer is None}

    @cached_property
    def device_flags(self) -> frozenset[ir.Var]:
        """Flags whose scope is the device."""
        return device_flags(self.program)

    def lowered(self, body: ir.Stmt) -> Phase:
        """The phase after this stage."""
        # The kernel's parameters also come from the grid, and from loads of the producer.
        launch = replace(self.launch, grid=tuple(self.expr(n) for n in self.launch.grid))
        ahead, free = set[str](), set[str]()
        for channel in self.phase.graph.channels:
            names = {self.local(data).name for data in channel.near} | {self.peers(data).name for data in channel.far}
            ahead |= names
            free |= names if channel.is_free else set()
        self._pass_extents(body, *launch.grid)
        if self.program.moments and self.sites:
            begin = tir.extern("tilescale::begin_moments", self.record())
            self.begins.append(self.one_thread(tir.evaluate(begin)))
        body = tir.sequence([*self.begins, body])
        kept = (tuple(self.parameters), tuple(self.arguments), tuple(self.sites))
        return self.done(
            body,
            launch=launch,
            headers=(*self.phase.headers, *self.headers),
            text=self.phase.text + "".join(self.libraries.values()),
            ordered=self.phase.ordered or self.ordered,
            signature=KernelParameters(
                *kept, frozenset(self.reached), frozenset(self.libraries), frozenset(ahead), frozenset(free)
            ),
        )

    def _pass_extents(self, *nodes: Any) -> None:
        """Pass the extents that a kernel uses, but that no tensor of its own has."""
        own = {n for _, buffer in self.parameters if buffer is not None for n in buffer.shape if isinstance(n, ir.Var)}
        used = {var for node in nodes for var in ir.instances(node, ir.Var)}
        for var in dict.fromkeys(n for p in self.program.parameters for n in p.shape if isinstance(n, ir.Var)):
            if var in used - own:
                self._parameter(HostVariable(var), partial(_plain, var))

    # -- the walk ----------------------------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement, lowered."""
        return tir.rewrite(stmt, enter=self._enter, leave=self._leave)

    def expr(self, expr: ir.PrimExpr) -> ir.PrimExpr:
        """An expression, lowered."""
        return tir.rewrite(tir.evaluate(expr), leave=self._leave).value if isinstance(expr, ir.PrimExpr) else expr

    def _enter(self, node: ir.Node) -> Any:
        if isinstance(node, ir.Stmt):
            self.where = location(node) or self.where
        if isinstance(node, ir.AttrStmt):
            return self._marked(node)
        if isinstance(node, ir.Bind):
            return self._bind(node)
        if isinstance(node, ir.For) and node.kind == ir.ForKind.PARALLEL and not self.in_parallel:
            return self._parallel(node)
        if isinstance(node, ir.Evaluate) and ir.op_name(node.value) in ops.ALL_OPS:
            return self._settled(node.value)
        return None

    def _marked(self, node: ir.AttrStmt) -> ir.Stmt | None:
        """A region of units, or a mark of an earlier stage."""
        unit = ExecutingThreads.of(node)
        if unit is not None:
            outer, self.executing = self.executing, unit
            body = self.stmt(node.body)
            self.executing = outer
            return executed(unit, body)
        if str(node.attr_key) == ops.SCALE:
            level = self.target.machine.level(str(node.value.value))
            if level.kind in ("unit", "program", "cluster"):
                return self.stmt(node.body)
            raise self.unsupported(f"T.Scale({level.name!r}) has no CUDA lowering")
        rule = rule_for(str(node.attr_key), UNIT)
        return None if rule is None else rule(self, node)

    def _parallel(self, node: ir.For) -> ir.Stmt:
        self.in_parallel = True
        made = self.stmt(node)
        self.in_parallel = False
        return made

    def _bind(self, node: ir.Bind) -> ir.Stmt | None:
        name = ir.op_name(node.value)
        if name == ops.VIEW.name:
            if node.var not in self.phase.parameters_of_views:
                raise self.unsupported("a view of a tile has no CUDA lowering")
            return tir.sequence([])
        if name == ops.RANK.name:
            return ir.Bind(node.var, self._rank_value(Rank.of(node.value).level))
        return None

    def _rank_value(self, name: str) -> ir.PrimExpr:
        level = self.target.machine.level(name)
        if level.kind == "unit":
            return self.rank(name)
        if level.kind == "program":
            return self.program_number()
        raise self.unsupported(f"the rank of level {name!r} has no CUDA lowering")

    def _settled(self, call: ir.Call) -> ir.Stmt:
        """An operation, after the loads of its operands from memory."""
        reads, settled = read_before(call) if call.op.name in READING and not self.in_parallel else ([], call)
        return tir.sequence([*(self.stmt(read) for read in reads), self._operation(settled)])

    def _operation(self, call: ir.Call) -> ir.Stmt:
        name, level = call.op.name, ir.attribute(call, "level")
        kind = UNIT if level is None else self.target.machine.level(level).kind
        if name in ops.COLLECTIVES - {ops.BARRIER.name} and dict(self.target.sizes).get(level) == 1:
            return self._alone(Collective.of(call))
        impl = ir.attribute(call, "impl")
        if by_nvshmem(call) and name in (ops.COPY.name, ops.SIGNAL.name):
            impl = IMPL
        elif (name, kind) == (ops.COPY.name, UNIT):
            impl = self.choice(call).name
        elif name in ops.COLLECTIVES and impl is None:
            impl = ON_TILES[TILES].get(name.removeprefix("tilescale."))
        rule = rule_for(name, kind, impl) if kind == UNIT else None
        if rule is None:
            what = f"T.{name.removeprefix('tilescale.')}"
            if kind == "program":
                found = f"{what} between all programs of a grid has no CUDA lowering"
                raise self.unsupported(found, self._in_clusters())
            by = f" by {impl}" if name == ops.COPY.name and kind == UNIT else f" of level {level!r}" if level else ""
            raise self.unsupported(f"{what}{by} has no CUDA lowering")
        return rule(self, call)

    def _in_clusters(self) -> str:
        """A hint on the units of a grid that can reach each other."""
        clusters = [level.name for level in self.target.machine.levels if level.kind == "cluster"]
        found = [f"programs of a cluster do, from two on: T.Kernel({name}=2)" for name in clusters]
        return "; or ".join([*found, "run it with tilescale.emulate"])

    def _alone(self, made: Collective) -> ir.Stmt:
        """A collective of one unit, which has everything already."""
        return tir.sequence([]) if made.is_in_place else self.stmt(tir.tile_call("copy", made.source, made.target))

    def _leave(self, node: ir.Node) -> Any:
        if isinstance(node, ir.Var) and node in self.phase.sizes:
            return self.phase.sizes[node]
        if isinstance(node, ir.Var) and node in self._scalars:
            return self.scalar(CallerArgument(self._scalars[node]), node.name, str(node.dtype))
        if isinstance(node, ir.Var) and node in self.phase.around:
            return self.scalar(HostVariable(node), node.name, str(node.dtype))
        if isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.scope() == "global":
            return self._on_local(node)
        if isinstance(node, ir.Call) and (rule := rule_for(ir.op_name(node), VALUE)) is not None:
            return rule(self, node)
        if isinstance(node, ir.IfThenElse) and ir.reads_memory(node.condition) and ir.contains(node, tir.is_extern):
            return _decided_once(node)
        return None

    def _on_local(self, node: ir.Node) -> Any:
        if self.is_parameter(node.buffer):
            return None
        buffer = self.local(node.buffer.data)
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(buffer, list(node.indices))
        return ir.BufferStore(buffer, node.value, list(node.indices))

    def _own(self, name: str) -> str:
        return super()._own(name + (self.executing.name if self.executing is not None else ""))

    # -- pieces that rules share -------------------------------------------------------------------------------------

    def program_number(self) -> ir.PrimExpr:
        """The number of the executing program in its grid, the first axis fastest."""
        number: Any = ir.IntImm("int32", 0)
        for var, extent in reversed(list(zip(self.launch.programs, self.launch.grid, strict=True))):
            number = number * extent + var
        return number

    def include(self, header: str) -> None:
        """The kernel calls functions of a header."""
        if header not in self.headers:
            self.headers.append(header)

    def call_nvshmem(self) -> None:
        """The kernel calls NVSHMEM."""
        self.libraries[IMPL] = declarations()

    def device_number(self, level: str, rank: Any) -> Any:
        """The number, among all devices, of `rank` at `level`, relative to this device."""
        return self.target.mesh.number(lambda name: rank if name == level else self.rank(name))

    def programs(self) -> int:
        """Programs of the grid."""
        extents = ir.constants(self.grid())
        if extents is None:
            raise self.unsupported("synchronisation across devices in a grid of symbolic extent has no CUDA lowering")
        return math.prod(extents)

    def grid(self) -> list[Any]:
        """Extents of the grid."""
        return [self.expr(n) for n in self.launch.grid]

    @property
    def is_shared(self) -> bool:
        """Whether programs share slots in the workspaces of collectives and barriers (workspace_slots.py)."""
        return self.phase.window is not None and self.phase.groups is None and not self.phase.graph.added

    @property
    def window(self) -> int:
        """Number of slots in the workspaces of collectives and barriers."""
        return self.phase.window if self.is_shared and self.phase.window else self.programs()

    def place(self) -> ir.PrimExpr:
        """The executing program's slot."""
        return self.program_number() % self.window if self.is_shared else self.program_number()

    def choice(self, call: ir.Call) -> MechanismChoice:
        """The mechanism of a copy of tiles, by the machine model."""
        try:
            return self.phase.choice(call)
        except UnsupportedError as error:
            raise error.at(self.where) if self.where else error from None

    def level_of(self, call: ir.Call) -> Level:
        """The level that an operation names."""
        return self.target.machine.level(ir.attribute(call, "level"))

    def one_thread(self, body: ir.Stmt) -> ir.Stmt:
        """One thread of the program, or of the current unit, runs `body`."""
        return one_thread(self.launch, body, self.executing.begin if self.executing is not None else 0)

    def after_wait(self, body: ir.Stmt) -> ir.Stmt:
        """`body`, in which one thread waits; then all threads see what it acquired."""
        return tir.sequence([body, acquired(sync())])


def _plain(var: ir.Var) -> tuple[ir.Var, None]:
    return var, None


def _decided_once(branch: ir.IfThenElse) -> ir.Stmt:
    """A branch whose condition is read once: TileLang reads it again for each statement, also after a call."""
    condition = ir.Var("condition", str(branch.condition.dtype))
    decided = ir.IfThenElse(condition, branch.then_case, branch.else_case)
    return tir.sequence([ir.Bind(condition, branch.condition), decided])
