# SPDX-License-Identifier: MIT
"""Operations on whole tensors as work on a device's stream: fills, copies, collectives.

Each is a step (steps.py): bound to a call's tensors, it returns its launches. Steps never wait for the device, and
allocate from PyTorch's pool, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilelang_core import ir, tl
from tilelang_core.formulas import formula, one
from tilelang_core.tiles import Fill
from tilescale.backends.cuda.running.collectives import LAUNCHERS, by_messages
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork, copied
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.cost.operations import region_bytes
from tilescale.program import ops
from tilescale.program.mesh import Mesh
from tilescale.program.operations import Collective, Copy, Rank

_RULES: dict[tuple[str | None, str], Callable[[ProgramContext, HostStep], CallStep]] = {}


def runs(name: str | None, impl: str = "") -> Callable:
    """Register the rule of a host operation, by its name and implementation."""

    def register(rule: Callable) -> Callable:
        _RULES[name, impl] = rule
        return rule

    return register


def host_step(context: ProgramContext, step: HostStep) -> CallStep:
    """A host operation as a function of the call."""
    if isinstance(step.stmt, ir.Bind):
        return _bind(context, step.stmt)
    return _RULES[ir.op_name(step.call), step.impl](context, step)


def _bind(context: ProgramContext, stmt: ir.Bind) -> CallStep:
    is_rank = ir.op_name(stmt.value) == ops.RANK.name
    rank = context.rank(Rank.of(stmt.value).level) if is_rank else None
    var, value = one(stmt.var), formula(stmt.value)

    def bind(call: ProgramCall) -> list[StreamWork]:
        call.variables[var] = call.evaluate(value) if rank is None else rank
        return []

    return bind


class TensorRegion:
    """A region of a tensor that a device phase names."""

    def __init__(self, context: ProgramContext, region: Any):
        buffer, begins, extents = ir.region_parts(region)
        self.begins, self.extents = list(map(formula, begins)), list(map(formula, extents))
        self.name = buffer.name
        self.context = context
        self.position: int | None = None
        self.workspace: arg.KernelWorkspace | None = None
        for position, parameter in enumerate(context.program.parameters):
            datas = [parameter.buffer.data, *(v.data for v in parameter.views)] if parameter.buffer is not None else []
            if any(buffer.data.same_as(d) for d in datas):
                self.position = position
        if self.position is None:
            self.workspace = arg.KernelWorkspace.of(buffer, context.program)
            context.memory.declare(self.workspace)

    def tensor(self, call: ProgramCall) -> torch.Tensor:
        """The whole tensor on this device."""
        if self.workspace is not None:
            return self.context.memory.tensor(self.workspace, call)
        assert self.position is not None
        return call.values[self.position]

    def index(self, call: ProgramCall) -> list[int]:
        """Begin of the region."""
        return [call.evaluate(b) for b in self.begins]

    def _slices(self, call: ProgramCall) -> tuple[slice, ...]:
        sizes = [call.evaluate(e) for e in self.extents]
        return tuple(slice(b, b + n) for b, n in zip(self.index(call), sizes, strict=True))

    def local(self, call: ProgramCall) -> torch.Tensor:
        """The region on this device."""
        tensor = self.tensor(call)
        return tensor if self._is_whole(tensor, call) else tensor[self._slices(call)]

    def reached(self) -> None:
        """Note that peers access this tensor."""
        if self.position is not None:
            self.context.reached.add(self.position)

    def stays(self) -> None:
        """Note that work bound to this tensor is invalid for any other."""
        if self.position is not None:
            self.context.fixed.add(self.position)

    def _is_whole(self, tensor: torch.Tensor, call: ProgramCall) -> bool:
        sizes = [call.known(e) for e in self.extents]
        return None in sizes or tuple(sizes) == tuple(tensor.shape)

    def tensor_on(self, device: int, call: ProgramCall) -> torch.Tensor:
        """The whole tensor on another device."""
        return self.context.peer_group.everywhere(self.tensor(call))[self.context.peer_group.slot(device)]

    def on(self, device: int, call: ProgramCall) -> torch.Tensor:
        """The region on another device."""
        tensor, remote = self.tensor(call), self.tensor_on(device, call)
        return remote if self._is_whole(tensor, call) else remote[self._slices(call)]


def _parts(context: ProgramContext, call: ir.Call) -> list[TensorRegion]:
    return [TensorRegion(context, region) for region in call.args if ir.op_name(region) == tl.REGION]


def device_of(context: ProgramContext, level: str, rank: int) -> int:
    """The number, among all devices, of a rank at a level relative to this device."""
    return Mesh(context.sizes).sibling(context.team.rank, level, rank)


@runs(tl.FILL)
def _fill(context: ProgramContext, step: HostStep) -> CallStep:
    fill = Fill.of(step.call)
    target, value = TensorRegion(context, fill.target), fill.value.value
    return lambda at: [partial(target.local(at).fill_, value)]


@runs(tl.COPY)
def _local_copy(context: ProgramContext, step: HostStep) -> CallStep:
    source, target = _parts(context, step.call)

    return lambda at: [copied(source.local(at), target.local(at))]


@runs(ops.COPY.name, "copy_engine")
def _copy(context: ProgramContext, step: HostStep) -> CallStep:
    copy = Copy.of(step.call)
    source, target, to_peer = TensorRegion(context, copy.source), TensorRegion(context, copy.target), copy.to_peer
    (target if to_peer else source).reached()

    def bind(at: ProgramCall) -> list[StreamWork]:
        device = device_of(context, copy.level, at.evaluate(copy.peer))
        if to_peer:
            return [copied(source.local(at), target.on(device, at))]
        return [copied(source.on(device, at), target.local(at))]

    return bind


@runs(ops.BARRIER.name)
def _barrier(context: ProgramContext, step: HostStep) -> CallStep:
    """A barrier of all ranks, including other groups of the level, because all run the same program."""
    what = f"T.{step.call.op.name.removeprefix('tilescale.')} of level {ir.attribute(step.call, 'level')!r}"
    context.sites.append(WaitSite(what, step.where))
    site = len(context.sites) - 1
    return lambda at: [context.barrier(site)]


# -- collectives -----------------------------------------------------------------------------------------------------


def message_texts(context: ProgramContext, step: HostStep) -> list[str]:
    """CUDA texts that a step will compile, as far as they are known before it is made."""
    if isinstance(step.stmt, ir.Bind) or _RULES.get((ir.op_name(step.call), step.impl)) is not _collective:
        return []
    made = Collective.of(step.call)
    return [kernel.text for kernel in by_messages.kernels(context, _placed(made, step, lambda: None), step.impl)]


def _placed(made: Collective, step: HostStep, written: Callable[[], None]) -> PlacedCollective:
    (whole, *_), buffer = made.whole, ir.region_parts(made.source)[0]
    return PlacedCollective(made, step.where, str(buffer.dtype), region_bytes(whole), written)


def _collective(context: ProgramContext, step: HostStep) -> CallStep:
    made = Collective.of(step.call)
    source, target, root = TensorRegion(context, made.source), TensorRegion(context, made.target), made.root
    placed = _placed(made, step, target.reached)
    bound = LAUNCHERS[made.name, step.impl](context, placed)
    norm = made.norm
    tiles = () if norm is None else (norm.weight, norm.bias, norm.normed, norm.residual, norm.quantized, norm.scales)
    others = made.sent, made.received, *tiles
    parts = [None if region is None else TensorRegion(context, region) for region in others]

    def bind(at: ProgramCall) -> list[StreamWork]:
        more = [None if part is None else part.local(at) for part in parts]
        return bound(Operands(source.local(at), target.local(at), 0 if root is None else at.evaluate(root), *more))

    return bind


_RULES.update({(f"tilescale.{name}", impl): _collective for name, impl in LAUNCHERS})
