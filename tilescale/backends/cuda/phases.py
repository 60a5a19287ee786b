# SPDX-License-Identifier: MIT
"""Device phases: what a device does once, as work on its stream between kernels.

Whole-tensor copies use the copy engine, collectives NCCL; signals and waits a kernel of one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale.backends.cuda import arguments as arg
from tilescale.backends.cuda.nccl import group
from tilescale.errors import UnsupportedError
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.model import DevicePhase, Launch

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.execute import Call, DeviceProgram

Step = Callable[["Call"], None]
_RULES: dict[str, Callable[[DeviceProgram, ir.Call, Launch], Step]] = {}


def _runs(name: str) -> Callable:
    def register(rule: Callable) -> Callable:
        _RULES[name] = rule
        return rule

    return register


def device_steps(own: DeviceProgram, phase: DevicePhase, launch: Launch | None) -> list[Step]:
    """The steps of a device phase.

    Raises:
        UnsupportedError: a statement that has no lowering, with its line.
    """
    return _steps(own, phase.stmt, launch)


def _steps(own: DeviceProgram, stmt: ir.Stmt, launch: Launch | None) -> list[Step]:
    if isinstance(stmt, ir.SeqStmt):
        return [step for s in stmt.seq for step in _steps(own, s, launch)]
    if isinstance(stmt, ir.AttrStmt):
        return _steps(own, stmt.body, launch)
    if isinstance(stmt, ir.Bind):
        return _bind(own, stmt)
    if isinstance(stmt, ir.Evaluate):
        reason = runs(stmt.value)
        if reason is None:
            rule = _RULES.get(ir.op_name(stmt.value))
            return [rule(own, stmt.value, launch)] if rule is not None else []
    raise UnsupportedError(
        "this statement of a device phase has no CUDA lowering",
        hint="run it with tilescale.emulate",
        where=location(stmt),
    )


def _bind(own: DeviceProgram, stmt: ir.Bind) -> list[Step]:
    name = ir.op_name(stmt.value)
    if name == ops.VIEW.name:
        return []
    if name == ops.RANK.name:
        rank = own.rank(str(stmt.value.args[0].value))
        return [lambda call: call.variables.__setitem__(stmt.var, rank)]
    return [lambda call: call.variables.__setitem__(stmt.var, call.evaluate(stmt.value))]


def runs(call: Any) -> str | None:
    """Why a statement of a device phase does not run here; None if it does."""
    name = ir.op_name(call)
    if name is None and ir.constant(call) is not None:
        return None
    if name not in _RULES:
        return f"{name} in a device phase has no CUDA lowering"
    if name == ops.COPY.name and len(call.args) > 3:
        return "T.copy(signal=) in a device phase has no CUDA lowering"
    if name == ops.ALLREDUCE.name and ir.op_name(call.args[-1]) == ops.COMBINE.name:
        return "T.allreduce(fn=) in a device phase has no CUDA lowering"
    return None


class Part:
    """A region of a tensor that a device phase names."""

    def __init__(self, own: DeviceProgram, region: Any, launch: Launch):
        buffer, self.begins, self.extents = ir.region_parts(region)
        self.own, self.position, self.workspace = own, None, None
        for position, parameter in enumerate(own.program.parameters):
            datas = [parameter.buffer.data, *(v.data for v in parameter.views)] if parameter.buffer is not None else []
            if any(buffer.data.same_as(d) for d in datas):
                self.position = position
        if self.position is None:
            shape = tuple(ir.constant(n) for n in buffer.shape)
            self.workspace = arg.Workspace(buffer.name, shape, str(buffer.dtype))

    def tensor(self, call: Call) -> torch.Tensor:
        """The whole tensor on this device."""
        return call.values[self.position] if self.position is not None else self.own.tensor(self.workspace)

    def _index(self, call: Call) -> tuple[slice, ...]:
        begins = [call.evaluate(b) for b in self.begins]
        sizes = [call.evaluate(e) for e in self.extents]
        return tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))

    def local(self, call: Call) -> torch.Tensor:
        """The region on this device."""
        tensor = self.tensor(call)
        return tensor if self._is_whole(tensor, call) else tensor[self._index(call)]

    def reached(self) -> None:
        """Peers touch this tensor."""
        if self.position is not None:
            self.own.reached.add(self.position)

    def _is_whole(self, tensor: torch.Tensor, call: Call) -> bool:
        sizes = [call.evaluate(e) for e in self.extents]
        return None in sizes or tuple(sizes) == tuple(tensor.shape)

    def on(self, device: int, call: Call) -> torch.Tensor:
        """The region on another device."""
        tensor = self.tensor(call)
        remote = self.own.heap.peers(tensor)[self.own.heap.addresses.slot(device)]
        return remote if self._is_whole(tensor, call) else remote[self._index(call)]


def _peer(own: DeviceProgram, level: str, rank: int) -> int:
    number = 0
    for name, size in own.sizes:
        number = number * size + (rank % size if name == level else own.rank(name))
    return number


@_runs("tl.tileop.fill")
def _fill(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    target, value = Part(own, call.args[0], launch), call.args[1].value
    return lambda at: target.local(at).fill_(value)


@_runs("tl.tileop.copy")
def _local_copy(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    source, target = Part(own, call.args[0], launch), Part(own, call.args[1], launch)
    return lambda at: target.local(at).copy_(source.local(at))


@_runs(ops.COPY.name)
def _copy(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    source, target = Part(own, call.args[0], launch), Part(own, call.args[1], launch)
    to_peer, level = ir.attribute(call, "far") == "dst", ir.attribute(call, "level")
    (target if to_peer else source).reached()

    def run(at: Call) -> None:
        device = _peer(own, level, at.evaluate(call.args[2]))
        if to_peer:
            target.on(device, at).copy_(source.local(at))
        else:
            target.local(at).copy_(source.on(device, at))

    return run


@_runs(ops.BARRIER.name)
def _barrier(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    from tilescale.backends.cuda.signature import Site

    own.sites.append(Site(f"T.barrier of level {ir.attribute(call, 'level')!r}", launch.where))
    site = len(own.sites) - 1
    return lambda at: own.meet(site)


# -- collectives -----------------------------------------------------------------------------------------------------


def _reduce_op(call: ir.Call) -> Any:
    from torch.distributed import ReduceOp

    return {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "max": ReduceOp.MAX, "min": ReduceOp.MIN}[
        ir.attribute(call, "op")
    ]


@_runs(ops.ALLREDUCE.name)
def _allreduce(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    import torch.distributed as dist

    part, op, team = Part(own, call.args[0], launch), _reduce_op(call), group(own, ir.attribute(call, "level"))

    def run(at: Call) -> None:
        tensor = part.local(at)
        dense = tensor.contiguous()
        dist.all_reduce(dense, op, group=team)
        if dense is not tensor:
            tensor.copy_(dense)

    return run


def _along_first(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    return tensor.movedim(axis, 0).contiguous()


@_runs(ops.REDUCE_SCATTER.name)
def _reduce_scatter(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    import torch.distributed as dist

    source, target = Part(own, call.args[0], launch), Part(own, call.args[1], launch)
    axis, op, team = ir.attribute(call, "dim"), _reduce_op(call), group(own, ir.attribute(call, "level"))

    def run(at: Call) -> None:
        out = target.local(at)
        dense = _along_first(out, axis)
        dist.reduce_scatter_tensor(dense, _along_first(source.local(at), axis), op, group=team)
        out.copy_(dense.movedim(0, axis))

    return run


@_runs(ops.ALL_GATHER.name)
def _all_gather(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    import torch.distributed as dist

    source, target = Part(own, call.args[0], launch), Part(own, call.args[1], launch)
    axis, team = ir.attribute(call, "dim"), group(own, ir.attribute(call, "level"))

    def run(at: Call) -> None:
        out = target.local(at)
        dense = _along_first(out, axis)
        dist.all_gather_into_tensor(dense, _along_first(source.local(at), axis), group=team)
        out.copy_(dense.movedim(0, axis))

    return run


@_runs(ops.ALL_TO_ALL.name)
def _all_to_all(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    import torch.distributed as dist

    source, target = Part(own, call.args[0], launch), Part(own, call.args[1], launch)
    axis, team = ir.attribute(call, "dim"), group(own, ir.attribute(call, "level"))

    def run(at: Call) -> None:
        out = target.local(at)
        dense = _along_first(out, axis)
        dist.all_to_all_single(dense, _along_first(source.local(at), axis), group=team)
        out.copy_(dense.movedim(0, axis))

    return run


@_runs(ops.BROADCAST.name)
def _broadcast(own: DeviceProgram, call: ir.Call, launch: Launch) -> Step:
    import torch.distributed as dist

    part, level = Part(own, call.args[0], launch), ir.attribute(call, "level")
    team = group(own, level)

    def run(at: Call) -> None:
        tensor = part.local(at)
        dense = tensor.contiguous()
        dist.broadcast(dense, _peer(own, level, at.evaluate(call.args[1])), group=team)
        if dense is not tensor:
            tensor.copy_(dense)

    return run
