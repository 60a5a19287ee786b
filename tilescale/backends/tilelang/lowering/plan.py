# SPDX-License-Identifier: MIT
"""Split device phases into host operations and grids of programs.

Why: a device executes a device phase once, but a GPU runs kernels and stream operations. Before: phases of arbitrary
statements. After: `HostStep`s, one operation on whole tensors each (copy engine, NCCL, fills, barriers), in control
flow of the host; and launches for the rest: one program of one thread for ordered statements, such as signals and
waits, and a grid over the elements or tiles of tensors for parallel loops, copies and collectives for which programs
are the best mechanism. The machine model decides (tilescale/cost). Control flow around them is the host's, which reads
its conditions in device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from tilelang_core import ir, tl, trace
from tilelang_core import rewrite as tir
from tilelang_core.tiles import is_region, regions_of
from tilescale.backends.tilelang.lowering import implemented
from tilescale.backends.tilelang.lowering.combine import fold
from tilescale.backends.tilelang.lowering.device_phase_grids import THREADS, DevicePhaseGrids, is_known, with_args
from tilescale.backends.tilelang.lowering.host_step import JOIN, QUEUE, QUEUE_BETWEEN, HostStep
from tilescale.backends.tilelang.lowering.internode import carried
from tilescale.backends.tilelang.lowering.markers import by_nvshmem
from tilescale.backends.tilelang.lowering.messages import PlanContext, level_of
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.queued import QueuedOperations
from tilescale.backends.tilelang.lowering.reach import BY_BOTH, BY_MESSAGES, share_memory, split
from tilescale.backends.tilelang.lowering.tile import TileRegion
from tilescale.cost.operations import copy_choice, network_of
from tilescale.errors import UnsupportedError
from tilescale.passes.structure import location
from tilescale.program import model, ops
from tilescale.program.model import Control, GridPhase, Launch, Part, Program
from tilescale.program.operations import Collective, Combine, Copy, Signal

_HOST_CALLS = tl.HOST_ARITHMETIC
"""Calls of TIR that fold to a constant for constant operands."""

_TILE_OPS = (tl.FILL, tl.COPY)


def plan(program: Program, target: LoweringTarget) -> tuple[Part, tuple[str, ...]]:
    """The program's phases with device phases split, and notes on their mechanisms. Raises UnsupportedError: a
    statement without a lowering, with its line."""
    planner = _Planner(program, target)
    body = planner.part(program.body)
    if planner.uses_queue:
        body = model.Sequence((body, planner.join()))
    return body, tuple(planner.notes)


class _Planner(DevicePhaseGrids):
    def __init__(self, program: Program, target: LoweringTarget):
        super().__init__(program.launches[0])
        self.program, self.target = program, target
        self.notes: list[str] = []
        self.uses_queue = False
        known = zip(program.extents, target.sizes, strict=True)
        self._sizes = {var: ir.IntImm("int32", n) for (_, var), (_, n) in known if isinstance(var, ir.Var)}
        self._names = {v.data: p.name for p in program.parameters for v in p.views}
        self._around = PlanContext()

    @cached_property
    def _queue(self) -> QueuedOperations:
        return QueuedOperations(self.program, self.target)

    # -- the tree of phases ------------------------------------------------------------------------------------------

    def part(self, part: Part) -> Part:
        if isinstance(part, Launch):
            self.launch = part
            return replace(part, body=self.part(part.body))
        if isinstance(part, model.Sequence):
            return model.Sequence(tuple(self.part(p) for p in part.parts))
        if isinstance(part, Control):
            self.where = location(part.stmt) or self.where
            stmt = self._on_host(self._sized(part.stmt))
            with self._around.inside(stmt):
                return Control(stmt, tuple(self.part(p) for p in part.parts))
        if isinstance(part, GridPhase):
            return GridPhase(self.with_bindings([carried(part.stmt, self.target, self.launch.where)]))
        return model.Sequence(tuple(self._device(self._sized(part.stmt))))

    def _sized(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement with numbers of units filled in for the launch."""
        return ir.substitute(stmt, self._sizes) if self._sizes else stmt

    def _device(self, stmt: ir.Stmt) -> list[Part]:
        """The statements of a device phase: runs of those for one program, and the parts between."""
        parts: list[Part] = []
        run: list[ir.Stmt] = []
        for inner in _flat(stmt):
            self.where = location(inner) or self.where
            for made in self._statement(inner):
                if isinstance(made, ir.Stmt):
                    run.append(made)
                    continue
                parts += [*self.one_program(run), made]
                run = []
        return [*parts, *self.one_program(run)]

    def _statement(self, stmt: ir.Stmt) -> list[Part | ir.Stmt]:
        """The result of a statement: parts, and statements for a program that runs them with their neighbours."""
        if isinstance(stmt, ir.Bind):
            return self._bind(stmt)
        if isinstance(stmt, ir.Evaluate):
            return self._operation(stmt)
        if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
            return [self.elementwise(stmt)]
        if isinstance(stmt, ir.For | ir.IfThenElse | ir.While) and ir.contains(stmt, self._is_whole):
            if isinstance(stmt, ir.IfThenElse) and ir.contains(stmt, self._is_message):
                return self._divided(self._on_host(stmt))
            with self._around.inside(stmt):
                checked = self._on_host(stmt)
                return [Control(checked, tuple(model.Sequence(tuple(self._device(s))) for s in ir.children(stmt)))]
        return [stmt]

    def _divided(self, branch: ir.IfThenElse) -> list[Part | ir.Stmt]:
        """A branch split into messages: a receiver takes part for any value of its own condition."""
        made: list[Part | ir.Stmt] = []
        for taken, body in zip((True, False), ir.children(branch), strict=False):
            condition = branch.condition if taken else ir.Not(branch.condition)
            for inner in _flat(body):
                if isinstance(inner, ir.Bind) and is_known(inner):
                    made += self._statement(inner)
                elif ir.contains(inner, self._is_message):
                    with self._around.under((branch.condition, taken)):
                        made += self._statement(inner)
                else:
                    made += self._statement(ir.IfThenElse(condition, inner, None))
        return made

    def _bind(self, bind: ir.Bind) -> list[Part | ir.Stmt]:
        if ir.op_name(bind.value) == ops.VIEW.name:
            return []
        self.bind(bind)
        return [self._host(bind) if is_known(bind) else bind]

    def _operation(self, stmt: ir.Evaluate) -> list[Part | ir.Stmt]:
        call = stmt.value
        name = ir.op_name(call)
        if name is None and ir.constant(call) is not None:
            return []
        if name == ops.BARRIER.name or name in _TILE_OPS and _on_tensors(call):
            return [self._host(stmt)]
        if self._is_message(call):
            return self._message(call)
        if name == ops.COPY.name:
            return self._copy(call)
        return self._collective(call) if name in ops.COLLECTIVES else [stmt]

    def _host(self, stmt: ir.Stmt, impl: str = "") -> HostStep:
        self.check_known(ir.uses(stmt))
        return HostStep(stmt, impl, self.where or self.launch.where)

    def _on_host(self, stmt: ir.Stmt) -> ir.Stmt:
        """Control flow around launches is the host's: it knows ranks and numbers, and reads device memory."""
        for expr in [stmt.min, stmt.extent] if isinstance(stmt, ir.For) else [stmt.condition]:
            self.check_known(sorted(ir.variables(expr), key=str))
            for node in ir.nodes(expr):
                self._check_host(node)
        return stmt

    def _check_host(self, node: ir.Node) -> None:
        if isinstance(node, ir.BufferLoad) and node.buffer.scope() != "global":
            raise self.unsupported(
                f"{node.buffer.name!r}, which lives on the chip and decides what to launch, has no CUDA lowering: "
                'keep it in device memory, T.alloc(..., level="l2")'
            )
        if isinstance(node, ir.Call) and ir.op_name(node) not in _HOST_CALLS:
            raise self.unsupported(
                f"{node.op.name.rpartition('.')[2]!r} in what decides what to launch has no CUDA lowering: compute it "
                "into device memory first, and compare that"
            )

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, call: ir.Call) -> list[Part | ir.Stmt]:
        copy = Copy.of(call)
        if by_nvshmem(call):
            # The copy itself signals the peer, after the data.
            return [self.grid([ir.Evaluate(call)], ir.Var("bx", "int32"), 1, THREADS)]
        if copy.signal is None:
            return self._copy_in_order(copy)
        what = f"T.copy(dst=, signal=) of {self._tensors((copy.source, copy.target))} by each device"
        reason = self._queue.against_copy(copy)
        if reason is None:
            return [self._on_queue(call, what)]
        if self._queue.waits:
            found = f"{what}, in a program where a copy waits for a flag, has no CUDA lowering: {reason}"
            raise self.unsupported(found)
        in_order = self._copy_in_order(copy)
        self.notes.append(f"{what}: synchronous: {reason}")
        # The queue's operations are older, and a device that sees this copy's flag may rely on them.
        return [*([self.join()] if self._queue.any else []), *in_order]

    def _on_queue(self, call: ir.Call, what: str) -> HostStep:
        self.uses_queue = True
        self.notes.append(f"{what}: asynchronous, on the copy queue")
        return self._host(ir.Evaluate(call), QUEUE)

    def join(self) -> HostStep:
        """Let later work wait for the queue."""
        return HostStep(ir.Evaluate(ir.IntImm("int32", 0)), JOIN, self.where or self.launch.where)

    def _copy_in_order(self, copy: Copy) -> list[Part | ir.Stmt]:
        call = copy.call
        sizes = dict(self.target.sizes)
        choice = self._chosen(lambda: copy_choice(call, self.target.machine, sizes, None, names=self.program.names))
        side, regions = "dst" if copy.to_peer else "src", (copy.source, copy.target)
        self.notes.append(f"T.copy({side}=) of {self._tensors(regions)} by each device: {choice}")
        whole = with_args(call, [*regions, copy.peer], {"impl": choice.name}, without=("op",))
        network = network_of(call, self.target.machine, sizes)
        chosen = network.mechanism(choice.name) if network is not None else None
        assert chosen is not None, f"{choice.name} is chosen from those of the network"
        if chosen.started_by == "host":
            parts: list[Part | ir.Stmt] = [self._host(ir.Evaluate(whole), choice.name)]
        else:
            extents = [[ir.constant(n) for n in ir.region_parts(r)[2]] for r in regions]
            parts = [self.tiles(whole, _axes_of_copy(extents))]
        if copy.signal is not None:
            update = trace.call(ops.SIGNAL, copy.signal, copy.value, copy.peer, level=copy.level, op=copy.op)
            parts.append(tir.evaluate(update))
        return parts

    def _chosen(self, choose: Any) -> Any:
        try:
            return choose()
        except UnsupportedError as error:
            raise error.at(self.where) if self.where else error from None

    def _tensors(self, args: Sequence[Any]) -> str:
        tiles = [ir.region_parts(a)[0] for a in args if is_region(a)]
        return ", ".join(dict.fromkeys(self._names.get(b.data, b.name) for b in tiles))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _is_whole(self, node: ir.Node) -> bool:
        return _is_whole(node) or self._is_message(node)

    def _is_message(self, node: ir.Node) -> bool:
        """Whether a copy or signal goes to devices that do not share memory with this one."""
        level = level_of(node)
        return level in dict(self.target.sizes) and not by_nvshmem(node) and not share_memory(self.target, level)

    def _message(self, call: ir.Call) -> list[Part | ir.Stmt]:
        """A copy or signal in which its receiver takes part."""
        copy = Copy.of(call) if ir.op_name(call) == ops.COPY.name else None
        tensors = (copy.source, copy.target) if copy is not None else (Signal.of(call).flag,)
        level = level_of(call)
        assert level is not None, "it goes to others"
        what = f"T.{'signal' if copy is None else 'copy'} of {self._tensors(tensors)} between {level}s"
        groups = split(self.target, level)
        carrier = BY_BOTH if groups is None else groups.carrier
        asked = None
        why_not = self._queue.against_copy(copy) if copy is not None and copy.signal is not None else ""
        if not self.target.nccl:
            asked = "NCCL, which cannot join these ranks"
        elif copy is not None and copy.impl is not None:
            asked = f"{carrier}, without impl={copy.impl!r}"
        elif why_not and self._queue.waits:
            asked = f"{carrier}, in order, where a copy waits for a flag: {why_not}"
        if asked is not None:
            raise self.unsupported(f"{what}: they share no memory, it would go by {asked}: it has no CUDA lowering")
        step = self._around.message(call, self.bound, BY_MESSAGES if why_not is not None else QUEUE_BETWEEN, self.where)
        if isinstance(step, str):
            raise self.unsupported(f"{what}, {step}, has no CUDA lowering: its receiver does not know of it")
        how = "; asynchronous, on the copy queue" if why_not is None else f"; synchronous: {why_not}" if why_not else ""
        self.notes.append(f"{what}: {carrier} (by {self.target.machine.name} they do not all share memory{how})")
        if why_not is None:
            self.uses_queue = True
            return [step]
        # The queue's operations are older, and a device that sees this copy's flag may rely on them.
        return [*([self.join()] if self._queue.any else []), step]

    # -- collectives -------------------------------------------------------------------------------------------------

    def _collective(self, call: ir.Call) -> list[Part]:
        made = Collective.of(call)
        if made.flags is not None:
            return [self._asynchronous_collective(made)]
        short, level = made.name, made.level
        if made.is_in_place and dict(self.target.sizes).get(level) == 1:
            self.notes.append(f"T.{short} of {self._tensors(call.args)} between {level}s: nothing, there is one")
            return []
        choice = self._chosen(lambda: implemented.choice(made, self.target, in_program=False))
        if choice is None:
            what = f"T.{short} of {self._tensors(call.args)} between {level}s"
            raise self.unsupported(f"{what} has no CUDA lowering{implemented.why_none(made, self.target)}")
        self.notes.append(f"T.{short} of {self._tensors(call.args)} between {level}s: {choice}")
        candidate = implemented.implementation(made, self.target, choice.name)
        if candidate is not None and candidate.on_tiles:
            chosen = with_args(call, call.args, {"impl": choice.name})
            return [self.tiles(chosen, self._axes_of_collective(call))]
        if made.combine is not None:
            return self._gather_and_fold(made, made.combine)
        return [self._host(ir.Evaluate(call), choice.name)]

    def _asynchronous_collective(self, made: Collective) -> HostStep:
        what = f"T.{made.name}(signal=) of {self._tensors(made.tiles)} between {made.level}s"
        reason = self._queue.against_collective(made)
        if reason is not None:
            raise self.unsupported(f"{what} has no CUDA lowering: {reason}")
        groups = split(self.target, made.level)
        if groups is not None and groups.across > 1:
            what = f"{what} ({groups.carrier})"
        return self._on_queue(made.call, what)

    def _axes_of_collective(self, call: ir.Call) -> list[tuple[int, ...]]:
        """Dimensions along which the tiles of a collective are independent of one another, for each of its tensors."""
        made = Collective.of(call)
        ranks, split = [len(ir.region_parts(tile)[2]) for tile in made.tiles], made.dim
        return [(axis,) * len(ranks) for axis in range(min(ranks)) if axis != split]

    def _gather_and_fold(self, made: Collective, combine: Combine) -> list[Part]:
        """A user's combination: all devices' tensors gathered, then folded element by element."""
        tiles = [TileRegion.of(region) for region in made.tiles]
        devices = dict(self.target.sizes)[made.level]
        steps: list[Part] = []
        gathered = []
        for number, tile in enumerate(tiles):
            name = f"gathered{len(self.notes)}_{number}"
            side = tir.local_buffer(name, [devices, *tile.extents], tile.dtype, "global")
            self.launch = replace(self.launch, buffers=(*self.launch.buffers, side))
            everybodys = tir.region(side, [0] * len(side.shape), list(side.shape), "w")
            gather = trace.call(ops.ALL_GATHER, made.tiles[number], everybodys, level=made.level, dim=0)
            steps.append(self._host(ir.Evaluate(gather), "nccl"))
            received = lambda sender, index, side=side: ir.BufferLoad(side, [sender, *index])  # noqa: E731
            gathered.append(SimpleNamespace(devices=devices, received=received))
        for which in range(len(tiles)):
            steps.append(self.elementwise(fold(self.unsupported, combine, which, tiles, gathered)))
        return steps


def _flat(stmt: ir.Stmt) -> Iterator[ir.Stmt]:
    """The statements of a device phase in order; scales of units that execute already are spliced in."""
    if isinstance(stmt, ir.SeqStmt | ir.AttrStmt):
        for inner in ir.children(stmt):
            yield from _flat(inner)
    else:
        yield stmt


def _is_whole(node: ir.Node) -> bool:
    """Whether a node is an operation on whole tensors, started by the host."""
    name = ir.op_name(node)
    return name in ops.COLLECTIVES or name == ops.COPY.name or name in _TILE_OPS and _on_tensors(node)


def _on_tensors(call: ir.Call) -> bool:
    """Whether a fill with a constant, or a copy, is on whole tensors only."""
    tiles = [ir.region_parts(region)[0] for region in regions_of(call)]
    value = [a for a in call.args if not is_region(a)]
    return all(b.scope() == "global" for b in tiles) and all(isinstance(v, ir.IntImm | ir.FloatImm) for v in value)


def _axes_of_copy(extents: Sequence[Sequence[int | None]]) -> list[tuple[int, ...]]:
    """Dimensions of source and target that belong together: those of more than one element, in order."""
    source, target = ([axis for axis, n in enumerate(shape) if n != 1] for shape in extents)
    return list(zip(source, target, strict=True))
