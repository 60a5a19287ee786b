# SPDX-License-Identifier: MIT
"""Kernel arguments of one program: the caller's tensors, their instances on peers, and the program's memory."""

from __future__ import annotations

import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tilelang_core import ir
from tilelang_core.formulas import Formula, formula
from tilescale.backends.cuda.running.barrier_kernel import purpose
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import ProgramCall, StreamWork
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.comm.heap.lasting import lasting
from tilescale.program.extents import agreed

_FLAGS_APART = 128
"""Alignment of the flags of each name, in bytes: no two names share a cache line."""


KEPT = 4
"""Number of shapes for which a program's tensor keeps memory: sizes that alternate need no new allocation."""

Made = TypeVar("Made")


class _LastFew(Generic[Made]):
    """Objects for the last few shapes. Ranks make them in the same order, so all drop the same ones."""

    def __init__(self, dropped: Callable[[], None]):
        self._made: dict[Hashable, Made] = {}
        self._dropped = dropped

    def get(self, shape: Hashable, make: Callable[[], Made]) -> Made:
        if shape not in self._made:
            if len(self._made) == KEPT:
                self._dropped()
                del self._made[next(iter(self._made))]
            self._made[shape] = make()
        return self._made[shape]

    def __getitem__(self, shape: Hashable) -> Made:
        return self._made[shape]

    def __iter__(self) -> Iterator[Made]:
        return iter(self._made.values())


class _Flags(NamedTuple):
    """Flags in one tensor, so that one launch zeroes them."""

    whole: torch.Tensor
    parts: dict[str, torch.Tensor]


class ProgramMemory:
    """Workspaces, symmetric stand-ins for tensors that peers reach and that are not symmetric, and copies of arguments.

    The first two are kept between calls, for the last few shapes. All ranks allocate them when a call has a new shape.
    `changed` is called when one is dropped, because calls bound to it are invalid. Tensors that the caller's graphs may
    have captured live as long as the program: a graph may be replayed at any time.
    """

    def __init__(self, context: ProgramContext, changed: Callable[[], None]):
        self._context = context
        self._declared: dict[str, arg.KernelWorkspace] = {}
        self._shapes: dict[str, list[Formula]] = {}  # by name
        self._workspaces: dict[str, _LastFew[torch.Tensor]] = defaultdict(partial(_LastFew, changed))
        self._staged: dict[int, _LastFew[torch.Tensor]] = defaultdict(partial(_LastFew, changed))
        self._flags: _LastFew[_Flags] = _LastFew(changed)
        self._captured: dict[int, torch.Tensor] = {}  # by address
        self._copies: dict[int, list[torch.Tensor]] = defaultdict(list)  # by position, small ones first
        launches, names = context.program.launches, context.program.workspace_names
        self._flag_names = {names[b.data] for launch in launches for b in launch.buffers if b.data in launch.flags}

    def declare(self, workspace: arg.KernelWorkspace) -> None:
        """A workspace that calls need."""
        if workspace.name not in self._declared:
            self._declared[workspace.name] = workspace
            self._shapes[workspace.name] = list(map(formula, workspace.shape))

    def tensor(self, workspace: arg.KernelWorkspace, call: ProgramCall) -> torch.Tensor:
        """A workspace's instance on this device, as allocated by `prepare` for such a call."""
        name = workspace.name
        if name in self._flag_names:
            return self._flags[self._flag_shapes(call)].parts[name]
        return self._workspaces[name][self._shape(name, call)]

    def _shape(self, name: str, call: ProgramCall) -> tuple[int, ...]:
        return tuple(call.evaluate(n) for n in self._shapes[name])

    def _flag_shapes(self, call: ProgramCall) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, self._shape(name, call)) for name in self._declared if name in self._flag_names)

    def _own_tensors(self) -> list[torch.Tensor]:
        return [*(t for made in self._workspaces.values() for t in made), *(flags.whole for flags in self._flags)]

    def keep(self) -> None:
        """Keep the present tensors: a graph of the caller's is captured with them."""
        staged = (tensor for made in self._staged.values() for tensor in made)
        self._captured |= {t.data_ptr(): t for t in (*self._own_tensors(), *staged)}

    def clear(self) -> None:
        """Zero the workspaces."""
        for tensor in self._own_tensors():
            tensor.zero_()

    def zeroed(self, call: ProgramCall) -> list[StreamWork]:
        """A launch that zeroes flags of `T.alloc_flags`, before the barrier at the entry: afterwards any rank may
        signal."""
        shapes = self._flag_shapes(call)
        return [self._flags[shapes].whole.zero_] if shapes else []

    def prepare(self, call: ProgramCall) -> None:
        """Allocate what a call needs, initially zero. Collective if its shape is new."""
        for name, made in self._declared.items():
            if name not in self._flag_names:
                shape = self._shape(name, call)
                self._workspaces[name].get(shape, partial(self._zeros, shape, made.dtype, made.symmetric))
        shapes = self._flag_shapes(call)
        if shapes:
            self._flags.get(shapes, partial(self._make_flags, dict(shapes)))

    def _make_flags(self, shapes: dict[str, tuple[int, ...]]) -> _Flags:
        types = [getattr(torch, self._declared[name].dtype) for name in shapes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes.values(), types, strict=True)]
        rooms = [-(-size // _FLAGS_APART) * _FLAGS_APART for size in sizes]
        whole = self._zeros((sum(rooms),), "uint8", True)
        cut = zip(shapes.items(), types, sizes, whole.split(rooms), strict=True)
        return _Flags(whole, {name: part[:n].view(dtype).view(shape) for (name, shape), dtype, n, part in cut})

    def _zeros(self, shape: tuple[int, ...], dtype: str, symmetric: bool) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if symmetric and not self._context.is_alone:
            return self._context.heap.zeros(shape, kind)
        return lasting(lambda: torch.zeros(shape, dtype=kind, device=self._context.device))

    def staged(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Symmetric stand-ins, by position, for tensors that peers reach and that are not in the heap."""
        reached = sorted(self._context.reached)
        return {i: self._staging(i, values[i]) for i in reached if not self._context.heap.is_symmetric(values[i])}

    def _staging(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        def make() -> torch.Tensor:
            name = self._context.program.parameters[position].name
            warnings.warn(
                f"{self._context.program.name}: peers reach {name!r}, which is not a symmetric tensor: each call "
                "copies it in and out. Allocate it with tilescale.empty, zeros or from_tensor to avoid the copies.",
                stacklevel=6,
            )
            return self._context.heap.empty(tuple(tensor.shape), tensor.dtype)

        return self._staged[position].get(tuple(tensor.shape), make)

    def copy_of(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of an argument, at the same address for all tensors of a size."""
        rooms = self._copies[position]
        room = next((room for room in rooms if room.nbytes >= tensor.nbytes), None)
        if room is None:
            nbytes = max([tensor.nbytes, *(2 * room.nbytes for room in rooms[-1:])])
            room = lasting(lambda: torch.empty(nbytes, dtype=torch.uint8, device=tensor.device))
            rooms.append(room)
        return room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def digest(self, call: ProgramCall) -> int:
        """Digest of the facts that all ranks must agree on: addresses and shapes of the tensors that peers reach; of
        the others the extents that the program names."""
        tensors = [call.values[i] for i in sorted(self._context.reached)]
        offset = self._context.heap.offset
        extents = [call.variables.get(var) for var in self._agreed]
        return zlib.crc32(repr([(offset(x), *x.shape, *x.stride()) for x in tensors] + extents).encode())

    @cached_property
    def _agreed(self) -> list[ir.Var]:
        return [var for _, var in agreed(self._context.program)]

    def value(self, argument: arg.Argument, call: ProgramCall) -> Any:
        """The value of a kernel's parameter in a call."""
        return _VALUES[type(argument)](self, self._context, argument, call)

    def _workspace(self, workspace: arg.KernelWorkspace, call: ProgramCall) -> torch.Tensor:
        here = self.tensor(workspace, call)
        return self._context.peer_group.everywhere(here) if workspace.peers else here


_VALUES: dict[type, Callable[[ProgramMemory, ProgramContext, Any, ProgramCall], Any]] = {
    arg.CallerArgument: lambda memory, context, a, call: call.values[a.position],
    arg.PeerInstances: lambda memory, context, a, call: context.peer_group.everywhere(call.values[a.position]),
    arg.KernelWorkspace: lambda memory, context, a, call: memory._workspace(a, call),
    arg.DeviceRank: lambda memory, context, a, call: context.rank(a.level),
    arg.SlotShift: lambda memory, context, a, call: context.peer_group.shift,
    arg.WaitLimit: lambda memory, context, a, call: context.guard.limit_ns,
    arg.WaitRecord: lambda memory, context, a, call: context.guard.records.device,
    arg.RendezvousWords: lambda memory, context, a, call: context.guard.ranks.everywhere,
    arg.RendezvousCounts: lambda memory, context, a, call: context.guard.ranks.counts,
    arg.BarrierPurpose: lambda memory, context, a, call: purpose(a.site, memory.digest(call) if a.checked else 0),
    arg.HostVariable: lambda memory, context, a, call: call.variables[a.var],
}
