# SPDX-License-Identifier: MIT
"""Run a lowered program on this rank's device: kernels and device phases in order, on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.base import Compilation
from tilescale.backends.cuda import headers
from tilescale.backends.cuda.lowered_cache import cached
from tilescale.backends.cuda.running import control, messages, nccl, queued, queued_exchange, transports  # noqa: F401 - four register steps
from tilescale.backends.cuda.running.agreement import alike, facts, on_all, once_per_node
from tilescale.backends.cuda.running.ahead import compilations, compiler_options
from tilescale.backends.cuda.running.collectives.workspaces import MessageWorkspaces
from tilescale.backends.cuda.running.concurrent_grids import concurrent_grids_step
from tilescale.backends.cuda.running.copy_queue import CopyQueue
from tilescale.backends.cuda.running.grids import check_residency, grid_step
from tilescale.backends.cuda.running.memory import ProgramMemory
from tilescale.backends.cuda.running.moments import kept
from tilescale.backends.cuda.running.peer_group import PeerGroup, own_addresses, sizes_of
from tilescale.backends.cuda.running.phases import host_step
from tilescale.backends.cuda.running.plans import Bind, CallPlan, CallPlans, standing_for
from tilescale.backends.cuda.running.recording import ProgramState, current_recording, recorded_memory
from tilescale.backends.cuda.running.replay import Arguments, kinds_of
from tilescale.backends.cuda.running.steps import CallStep, HostVariables, ProgramCall, StreamWork, in_order
from tilescale.backends.cuda.running.stream_order import stream_order
from tilescale.backends.cuda.running.sums import FlagSums
from tilescale.backends.cuda.running.wait_guard import WaitGuard
from tilescale.backends.cuda.target import check_gpu, target_or_auto
from tilescale.backends.processes import compile_missing
from tilescale.backends.tilelang import nvshmem_link
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.backends.tilelang.lowering.call_barriers import ENTRY, EXIT
from tilescale.backends.tilelang.lowering.check import KernelCheck
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.program import ConcurrentGrids, LoweredGrid, LoweredProgram
from tilescale.backends.tilelang.lowering.queued import leads_out
from tilescale.backends.tilelang.text import REWRITES, STRIDE
from tilescale.backends.tilelang.upstream_errors import explained
from tilescale.comm import Team, World, init
from tilescale.comm.heap import SymmetricHeap
from tilescale.comm.heap.default import heap_for
from tilescale.comm.heap.group import HeapGroup
from tilescale.errors import Location, UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.mod_analysis import written_parameters
from tilescale.program.arguments import bind, scalar
from tilescale.program.mesh import Mesh
from tilescale.program.model import Control, Launch, Part, location
from tilescale.program.model import Sequence as Parts
from tilescale.settings import settings


class DeviceProgram:
    """A program compiled for this rank's device.

    A program without a level above its grid is local to each rank: it opens symmetric memory and guards its calls only
    if it waits for flags.
    """

    def __init__(self, lowered: LoweredProgram, options: dict[str, Any]):
        """Collective; compiles nothing. A program lowered for other devices or addresses is lowered again."""
        self.program, machine = lowered.program, lowered.target.machine
        self.options = compiler_options(options)
        self.world: World = init()
        self.team: Team = options.get("team") or self.world
        self.device = self.world.device
        torch.cuda.set_device(self.device)
        self.is_alone = not self.program.extents
        self._written = written_parameters(self.program)
        if self.is_alone:
            self.world = self.team = World(ranks=(0,), rank=0, launcher=self.world.launcher, node_of=(0,))
        self._group = HeapGroup(self.team)
        if not self.is_alone:
            self.heap  # noqa: B018 - opened now, where all ranks are
        known = facts(self.program, machine, self.options)
        self.target = alike(self._group, known, self.program.func.script, partial(self._target_here, machine))
        self.sizes = self.target.sizes
        self.sites: list[WaitSite] = []
        self._limit_ns = int((options.get("wait_s") or settings().wait_s) * 1e9)
        self._order = stream_order(self.device)
        self._plans = CallPlans(
            lambda: self._order.stream() is None, (0, 0) if self.is_alone else own_addresses(self.heap)
        )
        self._lowered = lowered if lowered.target == self.target else cached(self.program, self.target)
        recorded_memory.has(self._plans.symmetric)
        self.memory = ProgramMemory(self, self._plans.clear)
        self.exchanges = MessageWorkspaces()
        self.sums = FlagSums()
        self.queue: CopyQueue | None = None  # once a step uses it
        self.queue_waits = False
        self.spared = 0
        self._transport: transports.Transport | None = None  # once a step uses it
        self._queue_transport: transports.Transport | None = None
        self._is_loaded = False  # once a call was made
        self._ahead: list[Compilation] | None = None  # its kernels, once they are asked for
        self._loaded: list[Any] = []  # their results, once one is used

    def _target_here(self, machine: Machine) -> LoweringTarget:
        """The target of this device. Raises the errors of ranks, a GPU, or devices that share memory, other than the
        machine's."""
        stride, mapped = (STRIDE, 1) if self.is_alone else (self.peer_group.stride, self.peer_group.size)
        by_nccl = not settings().share_gpus and nccl.joins(self.team, self.world)
        by_nvshmem = not self.is_alone and self.heap.provider == nvshmem_link.IMPL
        sizes = sizes_of(self.program, self.team)
        target = LoweringTarget(machine, sizes, stride, headers.__name__, by_nccl, by_nvshmem).with_mapped(mapped)
        if "target" not in self.options:
            check_gpu(machine, self.device)
        if not self.is_alone:
            self.peer_group.check(self.team, target, self.program.launches[0].where)
        return target

    def build(self) -> DeviceProgram:
        """Collective: compile the kernels; returns the program."""
        self._build()
        if self._waits:
            self.guard.check()  # made here, where all ranks are
        return self

    @cached_property
    def heap(self) -> SymmetricHeap:
        """The memory that this device shares with others of the program. Collective: its first use opens it."""
        return SymmetricHeap(self.team, self.device) if self.is_alone else heap_for(self.team)

    @cached_property
    def peer_group(self) -> PeerGroup:
        return PeerGroup.of(self.heap, self.team)

    @property
    def transport(self) -> transports.Transport:
        """The transport to devices without shared memory. Collective: the first use opens it. Raises as
        `transports.of`."""
        if self._transport is None:
            self._transport = transports.of(self, self.peer_group.size)
        return self._transport

    @property
    def queue_transport(self) -> transports.Transport:
        """The transport of the copy queue. Collective: a build's first use opens it. Raises as `transports.of`."""
        assert self.transport
        if self._queue_transport is None:
            self._queue_transport = transports.of(self, self.peer_group.size, for_queue=True)
        return self._queue_transport

    @cached_property
    def guard(self) -> WaitGuard:
        """The bounds of its waits. Collective at its first use."""
        heap = self.heap if self.is_alone else self.peer_group.heap
        made = self.program.name, self.world, heap, self._limit_ns, self.sites, self.compile, self.team
        return WaitGuard(*made, kept(self))

    def _build(self) -> None:
        self._plans.clear()
        self._transport = self._queue_transport = None
        shapes = [extent for p in self.program.parameters for extent in p.shape if not isinstance(extent, int)]
        self._asked = {var for extent in shapes for var in ir.variables(extent)}
        self.sites[:] = self._lowered.sites
        self.reads_at: Location | None = None
        self.by_nccl = False
        self.fixed = self._plans.fixed = set()
        self.reached = {position for grid in self._lowered.grids for position in grid.kernel.reached}
        generation = nccl.generation()
        if not self.is_alone and not self.peer_group.is_whole:
            assert self.transport  # opened now, where all ranks are
        self.spared = transports.QUEUE_SMS if leads_out(self._lowered.body, self.target) else 0
        if self._ahead is None:
            self._compile_ahead()
        self._steps = self._step(self._lowered.body)
        self._generation = generation
        self._waits: bool = bool(self.sites) or not self.is_alone
        if not self._lowered.rendezvous.inside:
            at = self.program.launches[0].where
            self._entry, self._exit = len(self.sites), len(self.sites) + 1
            self.sites += [WaitSite(ENTRY, at), WaitSite(EXIT, at)]

    def rank(self, level: str) -> int:
        return Mesh(self.sizes).rank(self.team.rank, level)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, part: Part) -> CallStep:
        if isinstance(part, Launch):
            return self._step(part.body)
        if isinstance(part, Parts):
            return in_order([self._step(p) for p in part.parts])
        if isinstance(part, Control):
            return self._control(part)
        if isinstance(part, LoweredGrid):
            return grid_step(self, part)
        if isinstance(part, ConcurrentGrids):
            return concurrent_grids_step(self, part)
        assert isinstance(part, HostStep)
        return host_step(self, part)

    def _control(self, part: Control) -> CallStep:
        stmt, where = part.stmt, location(part.stmt) or self.program.launches[0].where
        bodies = [self._step(p) for p in part.parts]
        if isinstance(stmt, ir.For):
            return control.loop(self, stmt, bodies[0], where)
        if isinstance(stmt, ir.While):
            return control.loop_while(self, stmt, bodies[0], where)
        return control.branch(self, stmt, bodies, where)

    def compile(self, func: ir.PrimFunc, check: KernelCheck | None = None) -> Any:
        """The kernel, checked and compiled. Collective."""
        return self._on_node(stock.KernelCompilation(func, REWRITES, check, self.options))

    def device_code(self, text: str) -> bytes:
        """CUDA text compiled for the device. Collective."""
        return self._on_node(stock.TextCompilation(text, self._code_target))

    def _compiled(self, made: Any) -> Any:
        """The kernel, or the code. Raises ShapeError, UnsupportedError: stock TileLang cannot compile it; and as
        `check_residency`, for a grid."""
        if isinstance(made, stock.TextCompilation):
            return made.run()
        generate = partial(stock.generate, target=self._code_target, pass_configs=self.options.get("pass_configs"))
        with explained(made.func, generate, self.program.launches[0].where):
            kernel = made.run()
        for grid in self._lowered.grids:
            if grid.kernel.func is made.func:
                check_residency(self, grid, kernel)
        return kernel

    def _on_node(self, made: Compilation) -> Any:
        """The result of a compilation: one rank of a node runs it first. Those compiled ahead are loaded together."""
        ahead = self._ahead or []
        if made not in ahead:
            return once_per_node(self._group, self._number_in_node[0] == 0, partial(self._compiled, made))
        if not self._loaded:  # all of them, as each agreement of the ranks takes milliseconds
            self._loaded = self.on_all(lambda: list(map(self._compiled, ahead)))
        return self._loaded[ahead.index(made)]

    def compilations(self) -> list[Compilation]:
        """The kernels, as far as they are known before the build, which leaves them to the caller."""
        self._ahead = compilations(self, self._lowered, self._code_target)
        return self._ahead

    def _compile_ahead(self) -> None:
        """Collective: compile several kernels in parallel, over the ranks and CPU cores of a node, into the cache."""
        jobs = self.compilations()
        if stock.keeps_kernels():
            self.on_all(lambda: compile_missing(jobs, *self._number_in_node))

    @property
    def _number_in_node(self) -> tuple[int, int]:
        """This rank's number among the program's ranks on its node, and their number."""
        here = [rank for rank in self.team.ranks if self.world.node_of[rank] == self.world.node]
        return here.index(self.team.ranks[self.team.rank]), len(here)

    @property
    def _code_target(self) -> Any:
        """The compilation target of texts, as TileLang takes it."""
        return self.options.get("target") or target_or_auto(self.target.machine)

    def on_all(self, make: Callable[[], Any]) -> Any:
        """Collective: this rank's result of `make`; an error on any rank is raised on all."""
        return on_all(self._group, make)

    def barrier(self, site: int) -> StreamWork:
        return self._with_rails(self.guard.barrier(site))

    def _with_rails(self, barrier: StreamWork) -> StreamWork:
        """A barrier of the ranks that share memory, then one of the rail: on return all ranks have arrived."""
        return barrier if self.peer_group.is_whole else transports.after(barrier, self.transport.barrier)

    # -- a call ------------------------------------------------------------------------------------------------------

    def again(self, values: Sequence[Any]) -> bool:
        """Run on arguments of the form of an earlier call; False, and nothing done, on others. Raises as a call."""
        if self._generation != nccl.generation():
            return False
        if (stream := self._order.stream()) is not None and self._launched(values, stream):
            if (recording := current_recording()) is not None:
                recording.launched(self._plans.replay(values), self._caller, stream)
            return True
        passed = self._plans.arguments_of(values)
        plan = self._plans.get(passed.form) if passed is not None else None
        if passed is None or plan is None:
            return False
        self._run(plan, passed.given, values)
        self._plans.can_launch(plan, values)
        return True

    @cached_property
    def _caller(self) -> ProgramState:
        return ProgramState(self.guard if self._waits else None, self._order, self._plans.symmetric)

    def _launched(self, values: Sequence[Any], stream: int) -> bool:
        """Whether C code knows the call; then it has been launched on the stream."""
        if not self._waits:
            return self._plans.launch(values, stream)
        self.guard.check()
        self._order.begin(stream)
        try:
            is_known = self._plans.launch(values, stream)
        except BaseException as error:
            self._give_up(error)
            raise
        if is_known:
            self._order.end()
        return is_known

    def __call__(self, values: list[Any]) -> None:
        """Run on this rank's arguments; returns when everything is on the stream.

        Raises:
            WaitTimeoutError, OutOfBoundsError, RankMismatchError: a wait of an earlier call failed.
            RankFailedError: and a rank of the job has failed.
        """
        # Kernels are compiled for dense tensors: others are copied in, and out if they are written.
        dense = {i: x.contiguous() for i, x in enumerate(values) if hasattr(x, "stride") and not x.is_contiguous()}
        given = [dense.get(i, x) for i, x in enumerate(values)]
        if not self.again(given):
            self._run(None, (), given)
        for i in self._written & dense.keys():
            values[i].detach().copy_(dense[i])

    def _run(self, plan: CallPlan | None, given: Arguments, values: Sequence[Any]) -> None:
        """Launch a plan's work, or bind these arguments to make it."""
        if (recording := current_recording()) is not None:
            recording.fail()
        stream = self._order.stream()
        if stream is None:
            self._check_capture()
        if self._waits:
            self.guard.check()
            if plan is None and self._generation != nccl.generation():
                self._build()
        ordered = stream if self._waits else None  # captured work has the order of its graph
        if ordered is not None:
            self._order.begin(ordered)
        try:
            if plan is not None:
                bind: Bind = partial(self._bind, plan.known, values)
            else:  # errors found here leave nothing half done
                plan, given, bind = self._plan(values)
            try:
                plan.launch(given, bind, stream)
            except BaseException as error:
                if self.queue is not None:
                    self.queue.drop()
                if ordered is not None:  # captured work does not run now
                    self._give_up(error)
                raise
        finally:
            if ordered is not None:
                self._order.end()
        if stream is None:
            self.memory.keep()

    def _give_up(self, error: BaseException) -> None:
        """Handle an incomplete call on this rank: the program cannot continue without `reset`. Raises RankFailedError
        where NCCL fails because a rank has died."""
        self.guard.records.stop()
        if self.by_nccl and nccl.is_failure(error):
            self.guard.blame(error)

    def _check_capture(self) -> None:
        """Reject calls that a CUDA graph cannot repeat. Raises UnsupportedError."""
        if self.reads_at is not None:
            raise UnsupportedError(
                f"{self.program.name!r} decides on values in device memory what to launch, which a CUDA graph cannot",
                hint="capture a program whose loops have a number of steps that is known before the call",
                where=self.reads_at,
            )

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, values: Sequence[Any]) -> tuple[CallPlan, Arguments, Bind]:
        """The plan of a new form, kept for later calls; with this call's arguments and launches."""
        known = bind(self.program, self.team.rank, values, self._open_sizes, self.device, self._written)
        launches = self._bind(known, values)  # the values read by binding define the form
        kinds, passed = kinds_of(self.program, values, self._plans.passed), self._plans.arguments_of(values)
        can_repeat, at_once = self.reads_at is None and not self.by_nccl, self.queue_waits and not self._is_loaded
        plan, self._is_loaded = CallPlan(kinds, known, can_repeat=can_repeat, at_once=at_once), True
        if passed is None:
            return plan, (), lambda replaced: launches
        self._plans.keep(passed.form, plan)
        return plan, passed.given, lambda replaced: launches

    def _bind(self, known: HostVariables, values: Sequence[Any], replaced: Collection[int] = ()) -> list[StreamWork]:
        """The launches of a call on these arguments, those at some positions replaced by copies that stay; `known` are
        the variables of its form. Collective where it needs new memory."""
        parameters = self.program.parameters
        scalars = {parameters[i].var: scalar(parameters[i], values[i]) for i in self._plans.passed}
        staged = {i: self.memory.copy_of(i, values[i]) for i in replaced} | self.memory.staged(values)
        given = [standing_for(x) for x in values]
        call = ProgramCall([staged.get(i, x) for i, x in enumerate(given)], {**known, **scalars})
        self.memory.prepare(call)  # now: later this device may wait for a peer that waits for this memory
        into: list[StreamWork] = [partial(copy.copy_, given[i]) for i, copy in staged.items()]
        out: list[StreamWork] = [partial(given[i].copy_, staged[i]) for i in sorted(self._written & staged.keys())]
        begin, end = self._around(call)
        launches = [*into, *begin, *self._steps(call), *end, *out]
        self._distinguish(call)
        return launches if self.queue is None else self.queue.batched(launches)

    def _distinguish(self, call: ProgramCall) -> None:
        """Let calls share a plan that differ only in scalars passed to kernels, not bound."""
        self._asked |= call.asked
        free = [i for i, p in enumerate(self.program.parameters) if p.buffer is None and p.var not in self._asked]
        passed = frozenset(free if self.reads_at is None else ())
        if passed != self._plans.passed:
            self._plans.clear()
            self._plans.passed = passed

    def _around(self, call: ProgramCall) -> tuple[list[StreamWork], list[StreamWork]]:
        """Begin and end of a call: zeroing of flags, barriers of all ranks. One kernel may do all of it."""
        rendezvous = self._lowered.rendezvous
        if rendezvous.inside:
            return [], []
        begin = self.memory.zeroed(call)
        if rendezvous.entry:
            came = self.guard.barrier(self._entry, self.memory.digest(call), patience=rendezvous.patience)
            begin.append(self._with_rails(came))
        return begin, [self.barrier(self._exit)] if rendezvous.exit else []

    @cached_property
    def _open_sizes(self) -> dict[ir.Var, int]:
        units = zip(self.program.extents, self.sizes, strict=True)
        return {var: size for (_, var), (_, size) in units if isinstance(var, ir.Var)}

    # -- after a call ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device is idle. Raises as a call does, for all calls until now."""
        if self._waits:
            self.guard.synchronize()
        else:
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Collective: reset after a failed wait, with counters and workspaces of zero. Raises as `WaitGuard.reset`."""
        if self._waits:
            self.guard.reset(self._clear)
        else:
            self._clear()

    def _clear(self) -> None:
        self.memory.clear()
        self.exchanges.clear()
