# SPDX-License-Identifier: MIT
"""Operations on whole tensors as work on a device's stream: copies by the copy engine, collectives by NCCL.

Each is a step (steps.py): bound to a call's tensors, it returns what it launches. Nothing here waits for the device,
and what is allocated comes from PyTorch's pool, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tilelang_core import ir, tl
from tilescale.backends.cuda.lowering import arguments as arg
from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.lowering.plan import HostStep
from tilescale.backends.cuda.running.nccl import group
from tilescale.backends.cuda.running.steps import Call, Step, Work
from tilescale.program import ops
from tilescale.program.operations import Collective, Copy, Rank

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.owner import Owner

_RULES: dict[tuple[str | None, str], Callable[[Owner, HostStep], Step]] = {}


def runs(name: str | None, impl: str = "") -> Callable:
    """Register the rule of an operation of the host, by its name and implementation."""

    def register(rule: Callable) -> Callable:
        _RULES[name, impl] = rule
        return rule

    return register


def host_step(own: Owner, step: HostStep) -> Step:
    """An operation of the host as a function of the call."""
    if isinstance(step.stmt, ir.Bind):
        return _bind(own, step.stmt)
    return _RULES[ir.op_name(step.call), step.impl](own, step)


def _bind(own: Owner, stmt: ir.Bind) -> Step:
    is_rank = ir.op_name(stmt.value) == ops.RANK.name
    rank = own.rank(Rank.of(stmt.value).level) if is_rank else None

    def bind(call: Call) -> list[Work]:
        call.variables[stmt.var] = call.evaluate(stmt.value) if rank is None else rank
        return []

    return bind


class Part:
    """A region of a tensor that a device phase names."""

    def __init__(self, own: Owner, region: Any):
        buffer, self.begins, self.extents = ir.region_parts(region)
        self.name = buffer.name
        self.own = own
        self.position: int | None = None
        self.workspace: arg.Workspace | None = None
        for position, parameter in enumerate(own.program.parameters):
            datas = [parameter.buffer.data, *(v.data for v in parameter.views)] if parameter.buffer is not None else []
            if any(buffer.data.same_as(d) for d in datas):
                self.position = position
        if self.position is None:
            self.workspace = arg.Workspace.of(buffer)
            own.memory.declare(self.workspace)

    def tensor(self, call: Call) -> torch.Tensor:
        """The whole tensor on this device."""
        if self.workspace is not None:
            return self.own.memory.tensor(self.workspace)
        assert self.position is not None
        return call.values[self.position]

    def index(self, call: Call) -> list[int]:
        """Where the region begins."""
        return [call.evaluate(b) for b in self.begins]

    def _slices(self, call: Call) -> tuple[slice, ...]:
        sizes = [call.evaluate(e) for e in self.extents]
        return tuple(slice(b, b + n) for b, n in zip(self.index(call), sizes, strict=True))

    def local(self, call: Call) -> torch.Tensor:
        """The region on this device."""
        tensor = self.tensor(call)
        return tensor if self._is_whole(tensor, call) else tensor[self._slices(call)]

    def reached(self) -> None:
        """Peers touch this tensor."""
        if self.position is not None:
            self.own.reached.add(self.position)

    def _is_whole(self, tensor: torch.Tensor, call: Call) -> bool:
        sizes = [call.known(e) for e in self.extents]
        return None in sizes or tuple(sizes) == tuple(tensor.shape)

    def tensor_on(self, device: int, call: Call) -> torch.Tensor:
        """The whole tensor on another device."""
        return self.own.heap.peers(self.tensor(call))[self.own.heap.addresses.slot(device)]

    def on(self, device: int, call: Call) -> torch.Tensor:
        """The region on another device."""
        tensor, remote = self.tensor(call), self.tensor_on(device, call)
        return remote if self._is_whole(tensor, call) else remote[self._slices(call)]


def _parts(own: Owner, call: ir.Call) -> list[Part]:
    return [Part(own, region) for region in call.args if ir.op_name(region) == tl.REGION]


def device_of(own: Owner, level: str, rank: int) -> int:
    """The number, over all devices, of a rank at a level as seen from this device."""
    number = 0
    for name, size in own.sizes:
        number = number * size + (rank % size if name == level else own.rank(name))
    return number


@runs(tl.FILL)
def _fill(own: Owner, step: HostStep) -> Step:
    (target,), value = _parts(own, step.call), step.call.args[1].value
    return lambda at: [partial(target.local(at).fill_, value)]


@runs(tl.COPY)
def _local_copy(own: Owner, step: HostStep) -> Step:
    source, target = _parts(own, step.call)

    return lambda at: [_copied(source.local(at), target.local(at))]


def _copied(source: torch.Tensor, out: torch.Tensor) -> Work:
    """`out` becomes `source`, which has as many elements in the same order."""
    if source.shape == out.shape:
        return partial(out.copy_, source)
    return lambda: out.copy_(source.reshape(out.shape))  # reshaping may copy


@runs(ops.COPY.name, "copy_engine")
def _copy(own: Owner, step: HostStep) -> Step:
    copy = Copy.of(step.call)
    source, target, to_peer = Part(own, copy.source), Part(own, copy.target), copy.to_peer
    (target if to_peer else source).reached()

    def bind(at: Call) -> list[Work]:
        device = device_of(own, copy.level, at.evaluate(copy.peer))
        if to_peer:
            return [_copied(source.local(at), target.on(device, at))]
        return [_copied(source.on(device, at), target.local(at))]

    return bind


def _meeting(own: Owner, step: HostStep) -> Step:
    """All ranks meet: those of other groups of the level, too, since all run the same program."""
    what = f"T.{step.call.op.name.removeprefix('tilescale.')} of level {ir.attribute(step.call, 'level')!r}"
    own.sites.append(Site(what, step.where))
    site = len(own.sites) - 1
    return lambda at: [own.meeting(site)]


@runs(ops.BARRIER.name)
def _barrier(own: Owner, step: HostStep) -> Step:
    return _meeting(own, step)


# -- collectives by NCCL ---------------------------------------------------------------------------------------------


def _reduce_op(call: ir.Call) -> Any:
    from torch.distributed import ReduceOp

    return {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "max": ReduceOp.MAX, "min": ReduceOp.MIN}[
        Collective.of(call).reduction
    ]


def _along_first(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor with a dimension moved to the front, dense: NCCL cuts and joins there."""
    return tensor.movedim(axis, 0).contiguous()


@runs(ops.ALLREDUCE.name, "nccl")
def _allreduce(own: Owner, step: HostStep) -> Step:
    import torch.distributed as dist

    made = Collective.of(step.call)
    part, op, team = Part(own, made.target), _reduce_op(step.call), group(own, made.level)

    return lambda at: [_on_dense(part.local(at), lambda dense: dist.all_reduce(dense, op, group=team))]


@runs(ops.BROADCAST.name, "nccl")
def _broadcast(own: Owner, step: HostStep) -> Step:
    import torch.distributed as dist

    made = Collective.of(step.call)
    part, level = Part(own, made.target), made.level
    team = group(own, level)

    def bind(at: Call) -> list[Work]:
        root = device_of(own, level, at.evaluate(made.root))
        return [_on_dense(part.local(at), lambda dense: dist.broadcast(dense, root, group=team))]

    return bind


def _on_dense(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> Work:
    """`change` of a tensor, which takes contiguous ones only."""
    if tensor.is_contiguous():
        return partial(change, tensor)

    def launch() -> None:
        dense = tensor.contiguous()
        change(dense)
        tensor.copy_(dense)

    return launch


def _from_parts(own: Owner, step: HostStep, exchange: Callable[..., Any]) -> Step:
    """A collective from one tensor to another: `exchange(out, source, group)` on dense ones cut along the first."""
    made = Collective.of(step.call)
    source, target, axis = Part(own, made.source), Part(own, made.target), made.axis
    team = group(own, made.level)

    def bind(at: Call) -> list[Work]:
        out, given = target.local(at), source.local(at)
        # What is gathered side by side has one more dimension than its parts.
        given = given if given.ndim == out.ndim else given.unsqueeze(axis)

        def launch() -> None:
            dense = _along_first(out, axis)
            exchange(dense, _along_first(given, axis), team)
            if dense.data_ptr() != out.data_ptr():
                out.copy_(dense.movedim(0, axis))

        return [launch]

    return bind


@runs(ops.REDUCE_SCATTER.name, "nccl")
def _reduce_scatter(own: Owner, step: HostStep) -> Step:
    import torch.distributed as dist

    op = _reduce_op(step.call)
    return _from_parts(own, step, lambda out, given, team: dist.reduce_scatter_tensor(out, given, op, group=team))


@runs(ops.ALL_GATHER.name, "nccl")
def _all_gather(own: Owner, step: HostStep) -> Step:
    import torch.distributed as dist

    return _from_parts(own, step, lambda out, given, team: dist.all_gather_into_tensor(out, given, group=team))


@runs(ops.ALL_TO_ALL.name, "nccl")
def _all_to_all(own: Owner, step: HostStep) -> Step:
    import torch.distributed as dist

    return _from_parts(own, step, lambda out, given, team: dist.all_to_all_single(out, given, group=team))


# -- collectives by copies -------------------------------------------------------------------------------------------


def _by_copies(own: Owner, step: HostStep, cut: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Step:
    """Every device writes into all others, between two meetings: `cut(source, size, peer)` to each."""
    made = Collective.of(step.call)
    source, target = Part(own, made.source), Part(own, made.target)
    level, axis = made.level, made.axis
    size, rank, meet = dict(own.sizes)[level], own.rank(level), _meeting(own, step)
    target.reached()

    def bind(at: Call) -> list[Work]:
        given = source.local(at)
        copies: list[Work] = []
        for step in range(size):
            peer = (rank + step) % size  # everybody writes to another one first
            out = target.on(device_of(own, level, peer), at)
            share = out.shape[axis] // size
            copies.append(partial(out.narrow(axis, rank * share, share).copy_, cut(given, size, peer)))
        return [*meet(at), *copies, *meet(at)]

    return bind


@runs(ops.ALL_GATHER.name, "copy_engine")
def _all_gather_by_copies(own: Owner, step: HostStep) -> Step:
    return _by_copies(own, step, lambda given, size, peer: given)


@runs(ops.ALL_TO_ALL.name, "copy_engine")
def _all_to_all_by_copies(own: Owner, step: HostStep) -> Step:
    axis = Collective.of(step.call).axis
    return _by_copies(own, step, lambda given, size, peer: given.chunk(size, axis)[peer])
