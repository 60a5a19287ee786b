# SPDX-License-Identifier: MIT
"""Run a lowered program on this rank's device: kernels and device phases in order, on the caller's stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Values
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.cuda import nvshmem_link
from tilescale.backends.cuda.lowering import arguments as arg
from tilescale.backends.cuda.lowering.check import kernels
from tilescale.backends.cuda.lowering.lanes.registers import one_array_each
from tilescale.backends.cuda.lowering.lower import GridLowering, LoweredKernel
from tilescale.backends.cuda.lowering.plan import plan
from tilescale.backends.cuda.lowering.signature import Site, Target
from tilescale.backends.cuda.running import control, nccl, occupancy
from tilescale.backends.cuda.running.agreement import Facts, agree, on_all, once_per_node
from tilescale.backends.cuda.running.guard import Guard
from tilescale.backends.cuda.running.phases import host_step
from tilescale.backends.cuda.running.streams import turns
from tilescale.backends.cuda.support import STRIDE, checked
from tilescale.comm import World, init
from tilescale.comm.heap import SymmetricHeap, default_heap
from tilescale.comm.heap.group import Group
from tilescale.errors import LaunchError, Location, UnsupportedError
from tilescale.hda import Machine
from tilescale.program import extents
from tilescale.program.model import Control, GridPhase, Launch, Part, Program, Sequence, location
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch

OWN_OPTIONS = ("out_idx", "wait_s")
"""Options of a kernel that are not TileLang's compiler's."""


class DeviceProgram:
    """A program compiled for this rank's device.

    A program without a level above its grid is each rank's own affair: it opens symmetric memory and guards its calls
    only if it waits for something.
    """

    def __init__(self, program: Program, machine: Machine, options: dict[str, Any]):
        import torch

        self.program = program
        self.options = {k: v for k, v in options.items() if v is not None and k not in OWN_OPTIONS}
        self.world: World = init()
        self.device = self.world.device
        torch.cuda.set_device(self.device)
        self.is_alone = not program.extents
        if self.is_alone:
            self.world = World(ranks=(0,), rank=0, launcher=self.world.launcher, node_of=(0,))
        self._group = Group(self.world)
        agree(self._group, _facts(program, machine, self.options))
        self.sizes = self._sizes()
        stride = STRIDE if self.is_alone else self.heap.addresses.stride
        self.target = Target(machine, self.sizes, stride, nccl=not settings().share_gpus)
        self.sites: list[Site] = []
        self._limit_ns = int((options.get("wait_s") or settings().wait_s) * 1e9)
        self.workspaces: dict[str, torch.Tensor] = {}
        self._declared: dict[str, arg.Workspace] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._build()
        if self._waits:
            self.guard.check()  # made here, where all ranks are

    @cached_property
    def heap(self) -> SymmetricHeap:
        """The memory that the program's devices share. Collective: its first use opens it."""
        return SymmetricHeap(self.world, self.device) if self.is_alone else default_heap()

    @cached_property
    def guard(self) -> Guard:
        """What bounds its waits. Collective at its first use."""
        return Guard(self.program.name, self.world, self.heap, self._limit_ns, self.sites, self.compile)

    def _build(self) -> None:
        self.sites.clear()
        self._declared.clear()
        self.kernels = 0
        self.reads_at: Location | None = None
        self.reached: set[int] = set()
        self._variables: list[ir.Var] = []
        self._generation = nccl.generation()
        self.run = self._part(plan(self.program, self.target)[0])
        self._waits = bool(self.sites) or not self.is_alone
        at = self.program.launches[0].where
        self._entry, self._exit = len(self.sites), len(self.sites) + 1
        self.sites += [Site("the meeting at its entry", at), Site("the meeting at its exit", at)]

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
        return host_step(self, part)

    def _control(self, part: Control, launch: Launch | None) -> Callable[[Call], None]:
        stmt, where = part.stmt, location(part.stmt) or self.program.launches[0].where
        if not isinstance(stmt, ir.For):
            bodies = [self._part(p, launch) for p in part.parts]
            if isinstance(stmt, ir.While):
                return control.loop_while(self, stmt, bodies[0], where)
            return control.branch(self, stmt, bodies, where)
        self._variables.append(stmt.loop_var)
        body = self._part(part.parts[0], launch)
        self._variables.pop()
        return control.loop(self, stmt, body, where)

    def _kernel(self, phase: GridPhase, launch: Launch) -> Callable[[Call], None]:
        around = tuple(self._variables)
        lowering = GridLowering(
            self.program, launch, self.target, self.kernels, first_site=len(self.sites), around=around
        )
        self.kernels += 1
        lowered = lowering.lower(phase)
        by_nvshmem = nvshmem_link.IMPL in lowered.libraries
        if by_nvshmem:
            on_all(self._group, lambda: nvshmem_link.prepare(self.heap, self.options, launch.where))
        kernel = self.compile(lowered.func, lambda: self._check_text(lowered))
        self._check_room(phase, launch, lowered.func, kernel)
        if by_nvshmem:
            kernel = nvshmem_link.started(kernel, launch.where)
        self.sites += lowered.sites
        self.reached |= lowered.reached
        for argument in lowered.arguments:
            if isinstance(argument, arg.Workspace):
                self.declare(argument)
        open_extents = [n for n in launch.grid if not ir.constant(n)]

        def step(call: Call) -> None:
            if 0 not in [call.evaluate(n) for n in open_extents]:  # CUDA refuses a grid of no programs
                kernel(*[_VALUES[type(a)](self, a, call) for a in lowered.arguments])

        return step

    def _check_room(self, phase: GridPhase, launch: Launch, func: ir.PrimFunc, kernel: Any) -> None:
        """A grid whose programs wait for one another has to be on the device as a whole. Raises LaunchError."""
        sizes, machine = dict(self.sizes), self.target.machine
        where = occupancy.waits_across(phase, launch, machine, sizes)
        if where is None:
            return

        def check() -> None:
            made = stock.generate(func, kernel.target, self.options.get("pass_configs"), one_array_each)
            text = next(kernels(made.text))
            code = stock.device_code(made.text, kernel.target, self.options.get("pass_configs"))
            image = occupancy.Image(code, text.name, text.threads, made.dynamic_shared, launch.cluster_size)
            held = occupancy.resident(image, self.device.index)
            occupancy.check_resident(self.program.name, occupancy.programs(launch, sizes), *held, where)

        on_all(self._group, check)

    def _check_text(self, lowered: LoweredKernel) -> None:
        target, configs = self.options.get("target") or "auto", self.options.get("pass_configs")
        checked(lowered, self.program, self.target.machine, target, configs)

    def compile(self, func: ir.PrimFunc, check: Callable[[], None] | None = None) -> Any:
        """The kernel; one rank of each node checks and compiles, the others find the result in the cache."""
        first = self.world.local_rank == 0

        def make() -> Any:
            if first and check is not None:
                check()
            return stock.compile_kernel(func, one_array_each, **self.options)

        return once_per_node(self._group, first, make)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def declare(self, workspace: arg.Workspace) -> None:
        """A workspace that a call needs."""
        self._declared.setdefault(workspace.name, workspace)

    def tensor(self, workspace: arg.Workspace) -> torch.Tensor:
        """A workspace's instance on this device, as the call in hand needs it."""
        return self.workspaces[workspace.name]

    def _make_workspaces(self, call: Call) -> None:
        """What the call needs, zero when it is made: again where a call needs another shape."""
        import torch

        for name, workspace in self._declared.items():
            shape = tuple(call.evaluate(n) for n in workspace.shape)
            known = self.workspaces.get(name)
            if known is not None and known.shape == shape:
                continue
            dtype = getattr(torch, workspace.dtype)
            if workspace.symmetric and not self.is_alone:
                self.workspaces[name] = self.heap.zeros(shape, dtype)
            else:
                self.workspaces[name] = torch.zeros(shape, dtype=dtype, device=self.device)

    def rank(self, level: str) -> int:
        """This rank's rank at a level: devices are numbered row-major, the coarsest level slowest."""
        names = [name for name, _ in self.sizes]
        finer = math.prod(n for _, n in self.sizes[names.index(level) + 1 :])
        return self.world.rank // finer % dict(self.sizes)[level]

    # -- a call ------------------------------------------------------------------------------------------------------

    def meet(self, site: int) -> None:
        """All devices meet, in the order of the current stream."""
        self.guard.meet(site)

    def __call__(self, values: list[Any]) -> None:
        """Run on this rank's arguments; returns when everything is on the stream.

        Raises:
            WaitTimeoutError, OutOfBoundsError, RankMismatchError: a wait of an earlier call failed.
            RankFailedError: and a rank of the job has failed.
        """
        # Kernels are compiled for dense tensors: others are copied in and out.
        dense = {i: x.contiguous() for i, x in enumerate(values) if hasattr(x, "stride") and not x.is_contiguous()}
        self._call([dense.get(i, x) for i, x in enumerate(values)])
        for i, copy in dense.items():
            values[i].copy_(copy)

    def _call(self, values: list[Any]) -> None:
        known = self._variables_of(values)
        self._check_capture()
        if not self._waits:
            call = Call(list(values), known)
            self._make_workspaces(call)
            return self.run(call)
        self.guard.check()
        if self._generation != nccl.generation():
            self._build()
        reached = {i: values[i] for i in sorted(self.reached)}
        staged = {i: self._staging(i, x) for i, x in reached.items() if not self.heap.is_symmetric(x)}
        call = Call([staged.get(i, value) for i, value in enumerate(values)], known)
        with turns(self.device).turn():
            self._make_workspaces(call)  # now: later this device may wait for a peer, which waits for the memory
            try:
                for i, copy in staged.items():
                    copy.copy_(values[i])
                self.guard.meet(self._entry, self._digest(call), patience=1)
                self.run(call)
                self.guard.meet(self._exit)
            except BaseException:
                self.guard.records.stop()  # this rank's part of the call is not complete: it cannot go on without reset
                raise
            for i, copy in staged.items():
                values[i].copy_(copy)

    def _check_capture(self) -> None:
        """Refuse what a CUDA graph would not repeat. Raises UnsupportedError."""
        import torch

        if self.reads_at is not None and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{self.program.name!r} decides on values in device memory what to launch, which a CUDA graph cannot",
                hint="capture a program whose loops have a number of steps that is known before the call",
                where=self.reads_at,
            )

    def _variables_of(self, values: list[Any]) -> dict[ir.Var, float]:
        """What the job and the arguments say of the program's variables: units, scalars, and open extents."""
        parameters = self.program.parameters
        units = zip(self.program.extents, self.sizes, strict=True)
        known = {var: size for (_, var), (_, size) in units if isinstance(var, ir.Var)}
        known |= {p.var: value for p, value in zip(parameters, values, strict=True) if p.buffer is None}
        return extents.solve(parameters, [getattr(value, "shape", None) for value in values], known)

    def _digest(self, call: Call) -> int:
        """What must be the same on all ranks: where the tensors that peers reach lie, and their shapes."""
        tensors = [call.values[i] for i in sorted(self.reached)]
        return zlib.crc32(repr([(self.heap.offset(x), *x.shape, *x.stride()) for x in tensors]).encode())

    def _staging(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """Symmetric memory for a tensor that peers reach and that is not in the heap."""
        known = self._staged.get(position)
        if known is None or known.shape != tensor.shape:
            name = self.program.parameters[position].name
            warnings.warn(
                f"{self.program.name}: peers reach {name!r}, which is not a symmetric tensor: each call copies it in "
                "and out. Allocate it with tilescale.empty, zeros or from_tensor to avoid the copies.",
                stacklevel=4,
            )
            known = self._staged[position] = self.heap.empty(tuple(tensor.shape), tensor.dtype)
        return known

    def synchronize(self) -> None:
        """Wait until the device has done everything. Raises as a call does, for all calls until now."""
        import torch

        if self._waits:
            self.guard.synchronize()
        else:
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Collective: begin anew after a failed wait, with counters and workspaces of zero. Raises as `Guard.reset`."""
        if self._waits:
            self.guard.reset(self._clear)
        else:
            self._clear()

    def _clear(self) -> None:
        for tensor in self.workspaces.values():
            tensor.zero_()


def _facts(program: Program, machine: Machine, options: dict[str, Any]) -> Facts:
    given = ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
    return Facts(program.name, ir.fingerprint(program.func), (machine.name, machine.digest), given or "no options")


def _in_order(steps: list[Callable[[Call], None]]) -> Callable[[Call], None]:
    def run(call: Call) -> None:
        for step in steps:
            step(call)

    return run


_VALUES: dict[type, Callable[[DeviceProgram, Any, Call], Any]] = {
    arg.Given: lambda own, a, call: call.values[a.position],
    arg.Peers: lambda own, a, call: own.heap.peers(call.values[a.position]),
    arg.Workspace: lambda own, a, call: own.heap.peers(own.tensor(a)) if a.peers else own.tensor(a),
    arg.Rank: lambda own, a, call: own.rank(a.level),
    arg.SlotShift: lambda own, a, call: own.heap.addresses.slot(0),
    arg.Limit: lambda own, a, call: own.guard.limit_ns,
    arg.WaitRecord: lambda own, a, call: own.guard.records.device,
    arg.HostVariable: lambda own, a, call: call.variables[a.var],
}
