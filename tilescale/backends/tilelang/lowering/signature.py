# SPDX-License-Identifier: MIT
"""The parameters of a generated kernel: created when a rule first requests them, in the order of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import (
    Argument,
    CallerArgument,
    DeviceRank,
    KernelWorkspace,
    PeerInstances,
    SlotShift,
    WaitLimit,
    WaitRecord,
    WaitSite,
)
from tilescale.backends.tilelang.lowering.phase import Phase, Stage


class Signature(Stage):
    """A stage with parameters, created at the first request, in the order of requests. `parameters`, `arguments`,
    `sites`, `reached`: as those of `KernelParameters`, so far."""

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.parameters: list[tuple[ir.Var, ir.Buffer | None]] = []
        self.arguments: list[Argument] = []
        self.sites: list[WaitSite] = []
        self.reached: set[int] = set()
        self._known: dict[Argument, Any] = {}

    def expr(self, expr: ir.PrimExpr) -> ir.PrimExpr:
        """An expression, lowered; the walk over statements defines it."""
        return expr

    def is_parameter(self, buffer: ir.Buffer) -> bool:
        """Whether a buffer is one of the kernel's tensors already."""
        return any(buffer.same_as(b) for b in self._known.values() if isinstance(b, ir.Buffer))

    def _parameter(self, argument: Argument, make: Callable[[], tuple[ir.Var, Any]]) -> Any:
        if argument not in self._known:
            var, buffer = make()
            self.parameters.append((var, buffer))
            self.arguments.append(argument)
            self._known[argument] = var if buffer is None else buffer
        return self._known[argument]

    def scalar(self, argument: Argument, name: str, dtype: str) -> ir.Var:
        """A hidden scalar parameter."""
        return self._parameter(argument, lambda: (ir.Var(name, dtype), None))

    def tensor(self, argument: Argument, name: str, shape: Any, dtype: str, strides: Any = None) -> ir.Buffer:

        def make() -> tuple[ir.Var, ir.Buffer]:
            # With two parameters of one name, stock TileLang would assume that only the kernel writes the second one.
            taken = sum(b is not None and b.name.rstrip("_") == name for _, b in self.parameters)
            return tir.parameter_buffer(name + "_" * taken, shape, dtype, strides=strides)

        return self._parameter(argument, make)

    def record(self) -> ir.PrimExpr:
        """Pointer to the record of waits."""
        return tir.address_of(self.tensor(WaitRecord(), "wait_record", [8], "int64"))

    def limit(self) -> ir.Var:
        """Limit of a wait, in nanoseconds."""
        return self.scalar(WaitLimit(), "wait_limit", "int64")

    def site(self, what: str, flag: str = "", compare: str = "") -> int:
        """The number of a new wait or signal."""
        self.sites.append(WaitSite(what, self.where, flag, compare))
        return self.phase.first_site + len(self.sites) - 1

    def rank(self, level: str) -> ir.Var:
        return self.scalar(DeviceRank(level), f"{level}_rank", "int32")

    def slot(self, peer: Any) -> ir.PrimExpr:
        """A near device's slot in the heap's address range. The modulo also proves it in bounds."""
        return (peer + self.scalar(SlotShift(), "slot_shift", "int32")) % self.target.slots

    def workspace(self, name: str, shape: tuple[int, ...], dtype: str, *, symmetric: bool = True) -> ir.Buffer:
        """This device's instance of memory that the runtime owns."""
        return self.tensor(KernelWorkspace(self._own(name), shape, dtype, symmetric), name, shape, dtype)

    def _own(self, name: str) -> str:
        """A workspace's name within the program: a phase's internal one is unique."""
        return f"{name}@{self.phase.number}"

    def is_own(self, workspace: str) -> bool:
        """Whether a workspace of that name is internal to this phase."""
        return workspace.endswith(f"@{self.phase.number}")

    def workspace_peers(self, name: str, shape: tuple[int, ...], dtype: str) -> ir.Buffer:
        """All devices' instances of it."""
        return self.everywhere(
            KernelWorkspace(self._own(name), shape, dtype, peers=True), f"{name}_peers", shape, dtype
        )

    def everywhere(self, argument: Argument, name: str, shape: Any, dtype: str) -> ir.Buffer:
        """A tensor parameter of all near devices' instances: one more leading dimension, and the heap's stride."""
        strides = self._peer_strides(shape, dtype)
        return self.tensor(argument, name, (self.target.slots, *shape), dtype, strides)

    def _peer_strides(self, shape: Any, dtype: str) -> list[Any]:
        strides: list[Any] = []
        step: Any = 1
        for extent in reversed(list(shape)):
            strides.insert(0, step)
            step = step * extent
        return [ir.IntImm("int64", self.target.stride * 8 // ir.bits(dtype)), *strides]

    def _global(self, data: ir.Var) -> tuple[int | None, Any, Any, str, str]:
        """Position (None: a workspace of the program), buffer, shape, type and name of a data variable's tensor."""
        data = self.phase.parameters_of_views.get(data, data)
        for position, parameter in enumerate(self.program.parameters):
            if parameter.buffer is not None and parameter.buffer.data.same_as(data):
                shape = [self.expr(n) for n in parameter.shape]
                return position, parameter.buffer, shape, str(parameter.buffer.dtype), parameter.name
        buffer = next(b for b in self.launch.buffers if b.data.same_as(data))
        return None, buffer, [self.expr(n) for n in buffer.shape], str(buffer.dtype), buffer.name

    def local(self, data: ir.Var) -> ir.Buffer:
        """This device's instance of a tensor."""
        position, buffer, shape, dtype, name = self._global(data)
        argument = KernelWorkspace.of(buffer, self.program) if position is None else CallerArgument(position)
        return self.tensor(argument, name, shape, dtype)

    def symmetric(self, data: ir.Var) -> ir.Buffer:
        """This device's instance of a tensor, which represents the peers' at the same address."""
        position = self._global(data)[0]
        if position is not None:
            self.reached.add(position)
        return self.local(data)

    def peers(self, data: ir.Var) -> ir.Buffer:
        """All devices' instances of a tensor."""
        position, buffer, shape, dtype, name = self._global(data)
        argument = KernelWorkspace.of(buffer, self.program, peers=True) if position is None else PeerInstances(position)
        return self.everywhere(argument, f"{name}_peers", shape, dtype)

    def far(self, buffer: ir.Buffer) -> ir.Buffer:
        """All devices' instances of a tensor, in the shape and type that a view of it has."""
        whole, shape, dtype = self.peers(buffer.data), [self.expr(n) for n in buffer.shape], str(buffer.dtype)
        seen, held = ([str(n) for n in extents] for extents in (shape, whole.shape[1:]))
        if buffer.data in self.phase.parameters_of_views or (seen, dtype) == (held, str(whole.dtype)):
            return whole
        return tir.alias(whole, (self.target.slots, *shape), dtype, self._peer_strides(shape, dtype))
