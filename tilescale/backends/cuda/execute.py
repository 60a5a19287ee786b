# SPDX-License-Identifier: MIT
"""Run a lowered program on this rank's device: kernels and device phases in order, on the caller's stream."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.cuda import arguments as arg
from tilescale.backends.cuda.barrier_kernel import barrier_function
from tilescale.backends.cuda.lower import GridLowering
from tilescale.backends.cuda.phases import device_steps
from tilescale.backends.cuda.signature import Site, Target
from tilescale.backends.cuda.timeouts import WaitRecords
from tilescale.comm import World, init
from tilescale.comm.heap import SymmetricHeap, default_heap
from tilescale.errors import LaunchError
from tilescale.hda import Machine
from tilescale.program.model import Control, GridPhase, Launch, Part, Program, Sequence
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch


@dataclass
class Call:
    """One call of a program: what the caller passed, and the values of host-level variables."""

    values: list[Any]
    variables: dict[ir.Var, int] = field(default_factory=dict)

    def evaluate(self, expr: Any) -> int:
        """An expression of host-level variables as a number."""
        mapping = {var: ir.IntImm(str(var.dtype), value) for var, value in self.variables.items()}
        return ir.constant(ir.substitute(expr, mapping) if isinstance(expr, ir.PrimExpr) else expr)


class DeviceProgram:
    """A program compiled for this rank's device."""

    def __init__(self, program: Program, machine: Machine, options: dict[str, Any]):
        import torch

        self.program, self.options = program, options
        self.world: World = init()
        self.device = torch.device("cuda", self.world.local_rank)
        torch.cuda.set_device(self.device)
        self.heap: SymmetricHeap = default_heap()
        self.sizes = self._sizes()
        self.target = Target(machine, self.sizes, self.heap.addresses.stride)
        self.records = WaitRecords(self.device)
        self.limit_ns = int(settings().wait_s * 1e9)
        self.sites: list[Site] = []
        self.workspaces: dict[str, torch.Tensor] = {}
        self.kernels = 0
        self.reached: set[int] = set()
        self._staged: dict[int, torch.Tensor] = {}
        self._variables: list[ir.Var] = []
        self.run = self._part(program.body)

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        """Units of each launched level; what is left open takes what the job has.

        Raises:
            LaunchError: the job has another number of ranks.
        """
        known = [(name, ir.constant(extent)) for name, extent in self.program.extents]
        fixed = math.prod(n for _, n in known if n is not None)
        open_ = [name for name, n in known if n is None]
        if self.world.size % fixed or (self.world.size != fixed and len(open_) != 1):
            raise LaunchError(
                f"{self.program.name!r} launches {fixed} devices, the job has {self.world.size} ranks",
                hint=f"start it with `tilescale run -n {fixed} ...`",
                where=self.program.launches[0].where,
            )
        return tuple((name, self.world.size // fixed if n is None else n) for name, n in known)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _part(self, part: Part, launch: Launch | None = None) -> Callable[[Call], None]:
        if isinstance(part, Launch):
            return self._part(part.body, part)
        if isinstance(part, Sequence):
            return _in_order([self._part(p, launch) for p in part.parts])
        if isinstance(part, Control):
            return self._control(part, launch)
        if isinstance(part, GridPhase):
            return self._kernel(part, launch)
        return _in_order(device_steps(self, part, launch))

    def _control(self, part: Control, launch: Launch | None) -> Callable[[Call], None]:
        stmt = part.stmt
        if isinstance(stmt, ir.For):
            self._variables.append(stmt.loop_var)
            body = self._part(part.parts[0], launch)
            self._variables.pop()

            def loop(call: Call) -> None:
                begin = call.evaluate(stmt.min)
                for value in range(begin, begin + call.evaluate(stmt.extent)):
                    call.variables[stmt.loop_var] = value
                    body(call)

            return loop
        bodies = [self._part(p, launch) for p in part.parts]

        def branch(call: Call) -> None:
            taken = call.evaluate(stmt.condition)
            if taken or len(bodies) > 1:
                bodies[0 if taken else 1](call)

        return branch

    def _kernel(self, phase: GridPhase, launch: Launch) -> Callable[[Call], None]:
        around = tuple(self._variables)
        lowering = GridLowering(
            self.program, launch, self.target, self.kernels, first_site=len(self.sites), around=around
        )
        self.kernels += 1
        lowered = lowering.lower(phase)
        kernel = self.compile(lowered.func)
        self.sites += lowered.sites
        self.reached |= {a.position for a in lowered.arguments if isinstance(a, arg.Peers)}
        return lambda call: kernel(*[_VALUES[type(a)](self, a, call) for a in lowered.arguments])

    def compile(self, func: ir.PrimFunc) -> Any:
        """The kernel; one rank of each node compiles, the others find the result in the cache."""
        options = {k: v for k, v in self.options.items() if v is not None and k != "out_idx"}
        first = self.world.local_rank == 0
        if not first:
            self.world.barrier()
        kernel = stock.compile_kernel(func, **options)
        if first:
            self.world.barrier()
        return kernel

    # -- arguments ---------------------------------------------------------------------------------------------------

    def tensor(self, workspace: arg.Workspace) -> torch.Tensor:
        """A workspace's instance on this device, zero when it is made."""
        import torch

        if workspace.name not in self.workspaces:
            dtype = getattr(torch, workspace.dtype)
            if workspace.symmetric:
                made = self.heap.zeros(workspace.shape, dtype)
            else:
                made = torch.zeros(workspace.shape, dtype=dtype, device=self.device)
            self.workspaces[workspace.name] = made
        return self.workspaces[workspace.name]

    def rank(self, level: str) -> int:
        """This rank's rank at a level: devices are numbered row-major, the coarsest level slowest."""
        names = [name for name, _ in self.sizes]
        finer = math.prod(n for _, n in self.sizes[names.index(level) + 1 :])
        return self.world.rank // finer % dict(self.sizes)[level]

    # -- a call ------------------------------------------------------------------------------------------------------

    @cached_property
    def _barrier(self) -> Any:
        return self.compile(barrier_function(self.world.size, self.target.stride))

    def meet(self, site: int) -> None:
        """All devices meet, in the order of the current stream."""
        counters = self.tensor(arg.Workspace("device_barrier", (1,), "int32"))
        epochs = self.tensor(arg.Workspace("device_epochs", (1,), "int32", symmetric=False))
        slot = self.heap.addresses.slot(self.world.rank)
        self._barrier(slot, self.limit_ns, site, self.heap.peers(counters), epochs, self.records.device)

    def __call__(self, values: list[Any]) -> None:
        """Run on this rank's arguments; returns when everything is on the stream.

        Raises:
            WaitTimeoutError: a wait of an earlier call ran out of time.
        """
        self.check()
        staged = {i: self._stage(i, values[i]) for i in self.reached if not self.heap.is_symmetric(values[i])}
        call = Call([staged.get(i, value) for i, value in enumerate(values)])
        self.meet(self._entry)
        self.run(call)
        self.meet(self._exit)
        for i, tensor in staged.items():
            values[i].copy_(tensor)
        self.records.fetch()

    def _stage(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """A symmetric copy of a tensor that peers reach and that is not in the heap."""
        known = self._staged.get(position)
        if known is None or known.shape != tensor.shape:
            name = self.program.parameters[position].name
            warnings.warn(
                f"{self.program.name}: peers reach {name!r}, which is not a symmetric tensor: each call copies it in "
                "and out. Allocate it with tilescale.empty, zeros or from_tensor to avoid the copies.",
                stacklevel=4,
            )
            known = self._staged[position] = self.heap.empty(tuple(tensor.shape), tensor.dtype)
        known.copy_(tensor)
        return known

    def synchronize(self) -> None:
        """Wait until everything that was called has run.

        Raises:
            WaitTimeoutError: a wait ran out of time.
        """
        import torch

        torch.cuda.synchronize(self.device)
        self.check()

    @cached_property
    def _entry(self) -> int:
        self.sites.append(Site("the meeting of all ranks at the program's entry", self.program.launches[0].where))
        return len(self.sites) - 1

    @cached_property
    def _exit(self) -> int:
        self.sites.append(Site("the meeting of all ranks at the program's exit", self.program.launches[0].where))
        return len(self.sites) - 1

    def check(self) -> None:
        """Raise WaitTimeoutError if a wait of a call that has ended ran out of time."""
        self.records.check(self.program.name, self.world.rank, tuple(self.sites), self.limit_ns)


def _in_order(steps: list[Callable[[Call], None]]) -> Callable[[Call], None]:
    def run(call: Call) -> None:
        for step in steps:
            step(call)

    return run


_VALUES: dict[type, Callable[[DeviceProgram, Any, Call], Any]] = {
    arg.Given: lambda own, a, call: call.values[a.position],
    arg.Peers: lambda own, a, call: own.heap.peers(call.values[a.position]),
    arg.Workspace: lambda own, a, call: own.heap.peers(own.tensor(_instance(a))) if a.peers else own.tensor(a),
    arg.Rank: lambda own, a, call: own.rank(a.level),
    arg.SlotShift: lambda own, a, call: own.heap.addresses.slot(0),
    arg.Limit: lambda own, a, call: own.limit_ns,
    arg.WaitRecord: lambda own, a, call: own.records.device,
    arg.HostVariable: lambda own, a, call: next(v for var, v in call.variables.items() if var.name == a.name),
}


def _instance(workspace: arg.Workspace) -> arg.Workspace:
    return arg.Workspace(workspace.name, workspace.shape, workspace.dtype, workspace.symmetric)
