# SPDX-License-Identifier: MIT
"""What kernels of one program take: the caller's tensors, their instances on peers, and memory of the program's own."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale.backends.cuda.lowering import arguments as arg
from tilescale.backends.cuda.running.barrier_kernel import purpose
from tilescale.backends.cuda.running.steps import Call, Work
from tilescale.program.lengths import agreed

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.owner import Owner


_FLAGS_APART = 128
"""Bytes at a multiple of which the flags of each name begin: no two names share a cache line."""


class Memory:
    """Workspaces, and symmetric stand-ins for tensors that peers reach and that are not symmetric.

    Both are kept between calls and made anew, by all ranks, when a call needs them in another shape. `changed` is
    called then: what was bound to the old ones is out of date. Those that a graph of the caller's was captured with
    stay as long as the program: it may be replayed at any time.
    """

    def __init__(self, own: Owner, changed: Callable[[], None]):
        self._own, self._changed = own, changed
        self._declared: dict[str, arg.Workspace] = {}
        self._workspaces: dict[str, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._captured: dict[int, torch.Tensor] = {}  # by where they lie
        launches = own.program.launches
        self._flag_names = {b.name for launch in launches for b in launch.buffers if b.data in launch.flags}
        self._flags: torch.Tensor | None = None  # all of them, one tensor's behind the other's

    def declare(self, workspace: arg.Workspace) -> None:
        """A workspace that calls need."""
        self._declared.setdefault(workspace.name, workspace)

    def tensor(self, workspace: arg.Workspace) -> torch.Tensor:
        """A workspace's instance on this device, as `prepare` has made it."""
        return self._workspaces[workspace.name]

    def keep(self) -> None:
        """A graph of the caller's is captured with what there is now."""
        self._captured |= {t.data_ptr(): t for t in (*self._workspaces.values(), *self._staged.values())}

    def clear(self) -> None:
        """Workspaces are zero again."""
        for tensor in self._workspaces.values():
            tensor.zero_()

    def zeroed(self) -> list[Work]:
        """What makes flags of `T.alloc_flags` zero, before the barrier at the entry: who comes from it may signal."""
        return [] if self._flags is None else [self._flags.zero_]

    def prepare(self, call: Call) -> None:
        """Make what a call needs, zero when it is made. Collective if its shape is new."""
        shapes = {name: tuple(call.evaluate(n) for n in made.shape) for name, made in self._declared.items()}
        known = {name: tuple(made.shape) for name, made in self._workspaces.items()}
        new = [name for name, shape in shapes.items() if known.get(name) != shape]
        if any(name in known for name in new):
            self._changed()
        if any(name in self._flag_names for name in new):
            self._make_flags({name: shape for name, shape in shapes.items() if name in self._flag_names})
        for name in new:
            if name not in self._flag_names:
                made = self._declared[name]
                self._workspaces[name] = self._zeros(shapes[name], made.dtype, made.symmetric)

    def _make_flags(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Flags lie in one tensor, so that one launch makes them zero."""
        import torch

        types = [getattr(torch, self._declared[name].dtype) for name in shapes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes.values(), types, strict=True)]
        rooms = [-(-size // _FLAGS_APART) * _FLAGS_APART for size in sizes]
        self._flags = self._zeros((sum(rooms),), "uint8", True)
        parts = self._flags.split(rooms)
        for (name, shape), dtype, size, part in zip(shapes.items(), types, sizes, parts, strict=True):
            self._workspaces[name] = part[:size].view(dtype).view(shape)

    def _zeros(self, shape: tuple[int, ...], dtype: str, symmetric: bool) -> torch.Tensor:
        import torch

        kind = getattr(torch, dtype)
        if symmetric and not self._own.is_alone:
            return self._own.heap.zeros(shape, kind)
        return torch.zeros(shape, dtype=kind, device=self._own.device)

    def staged(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Symmetric stand-ins, by position, for tensors that peers reach and that are not in the heap."""
        reached = sorted(self._own.reached)
        return {i: self._staging(i, values[i]) for i in reached if not self._own.heap.is_symmetric(values[i])}

    def _staging(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        known = self._staged.get(position)
        if known is None or known.shape != tensor.shape:
            name = self._own.program.parameters[position].name
            warnings.warn(
                f"{self._own.program.name}: peers reach {name!r}, which is not a symmetric tensor: each call copies it "
                "in and out. Allocate it with tilescale.empty, zeros or from_tensor to avoid the copies.",
                stacklevel=4,
            )
            if known is not None:
                self._changed()
            known = self._staged[position] = self._own.heap.empty(tuple(tensor.shape), tensor.dtype)
        return known

    def digest(self, call: Call) -> int:
        """What must be the same on all ranks: where the tensors that peers reach lie, and their shapes; of the others
        the extents that the program knows by name."""
        tensors = [call.values[i] for i in sorted(self._own.reached)]
        offset = self._own.heap.offset
        extents = [call.variables.get(var) for var in self._agreed]
        return zlib.crc32(repr([(offset(x), *x.shape, *x.stride()) for x in tensors] + extents).encode())

    @cached_property
    def _agreed(self) -> list[ir.Var]:
        return [var for _, var in agreed(self._own.program)]

    def value(self, argument: arg.Argument, call: Call) -> Any:
        """What a kernel is passed for one of its parameters in a call."""
        return _VALUES[type(argument)](self, self._own, argument, call)

    def _workspace(self, workspace: arg.Workspace) -> torch.Tensor:
        here = self.tensor(workspace)
        return self._own.near.everywhere(here) if workspace.peers else here


_VALUES: dict[type, Callable[[Memory, Owner, Any, Call], Any]] = {
    arg.Given: lambda memory, own, a, call: call.values[a.position],
    arg.Peers: lambda memory, own, a, call: own.near.everywhere(call.values[a.position]),
    arg.Workspace: lambda memory, own, a, call: memory._workspace(a),
    arg.Rank: lambda memory, own, a, call: own.rank(a.level),
    arg.SlotShift: lambda memory, own, a, call: own.near.shift,
    arg.Limit: lambda memory, own, a, call: own.guard.limit_ns,
    arg.WaitRecord: lambda memory, own, a, call: own.guard.records.device,
    arg.RendezvousWords: lambda memory, own, a, call: own.guard.ranks.everywhere,
    arg.RendezvousCounts: lambda memory, own, a, call: own.guard.ranks.counts,
    arg.Purpose: lambda memory, own, a, call: purpose(a.site, memory.digest(call) if a.checked else 0),
    arg.HostVariable: lambda memory, own, a, call: call.variables[a.var],
}
