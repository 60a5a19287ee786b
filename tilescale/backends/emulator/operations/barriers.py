# SPDX-License-Identifier: MIT
"""Barriers of programs and clusters, and those of all units of a level."""

from __future__ import annotations

from functools import partial

from tilelang_core import ir, tl
from tilelang_core.scalars import BarrierArrival, BarrierWait, NamedBarrier, OffsetPointer
from tilescale.backends.emulator.execute.barriers import MBarrier
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.programs import ProgramInstance
from tilescale.backends.emulator.execute.unit_rendezvous import rendezvous
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.errors import Location, OutOfBoundsError
from tilescale.program import ops
from tilescale.program.model import declaration
from tilescale.program.operations import Barrier


class BarrierReference:
    """An mbarrier that an operation names."""

    def __init__(self, compiler: Compiler, node: ir.BufferLoad | OffsetPointer):
        data, index = (
            (node.data, node.position) if isinstance(node, OffsetPointer) else (node.buffer.data, node.indices[0])
        )
        self.slot = compiler.slot(data)
        self.buffer = compiler.owned_buffer(self.slot)
        self.index = compiler.expr(index)
        self.where = compiler.where

    def of(self, frame: Frame, program: ProgramInstance | None = None) -> MBarrier:
        """The barrier of the frame's program, or of another one of its cluster."""
        index = uniform(self.index(frame), frame, "which barrier")
        barriers = frame.slots[self.slot]
        if not 0 <= index < len(barriers):
            raise OutOfBoundsError(
                f"{self.buffer.name}[{index}] is outside the barriers, of which there are {len(barriers)}",
                where=declaration(self.buffer),
            )
        if program is not None:
            barriers = program.unit.owner(self.slot).storage[self.slot]
        return barriers[index]


@operation(tl.WAIT_BARRIER_PARITY, tl.PTX_WAIT_BARRIER)
def _barrier_wait(compiler: Compiler, call: ir.Call) -> Closure:
    wait = BarrierWait.of(call)
    barrier, parity = BarrierReference(compiler, wait.barrier), compiler.expr(wait.parity)
    return lambda frame: barrier.of(frame).wait(uniform(parity(frame), frame, "a parity"), frame, barrier.where)


@operation(tl.ARRIVE_BARRIER, tl.PTX_ARRIVE_BARRIER_EXPECT_TX, tl.PTX_CP_ASYNC_BARRIER_NOINC, collective=False)
def _barrier_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    barrier = BarrierReference(compiler, BarrierArrival.of(call).barrier)
    return lambda frame: barrier.of(frame).arrive(frame.active(), frame, barrier.where)


@operation(tl.TCGEN05_MMA_ARRIVE, collective=False)
def _mma_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    barrier = BarrierReference(compiler, BarrierArrival.of(call).barrier)
    return lambda frame: barrier.of(frame).arrive(1, frame, barrier.where)


@operation(tl.ARRIVE_CLUSTER_BARRIER, collective=False)
def _remote_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    arrival = BarrierArrival.of(call)
    barrier, rank = BarrierReference(compiler, arrival.barrier), compiler.expr(arrival.rank)

    def run(frame: Frame) -> None:
        program = frame.program.in_cluster(uniform(rank(frame), frame, "a rank in the cluster"))
        barrier.of(frame, program).arrive(frame.active(), frame, barrier.where)

    return run


@operation(tl.STORAGE_SYNC)
def _sync_threads(compiler: Compiler, call: ir.Call) -> Closure:
    """Threads of one coroutine run in lockstep; a named barrier with a count synchronizes with other coroutines."""
    where, named = compiler.where, NamedBarrier.of(call)
    if named.count is None:
        # TileLang restricts a barrier under a thread-dependent condition to the threads that satisfy it: the executing
        # unit's.
        return (lambda frame: None) if compiler.threads_apart else partial(_sync_participants, where)
    number, count = compiler.expr(named.number), compiler.expr(named.count)

    def run(frame: Frame) -> None:
        name, expected = uniform(number(frame), frame, "a barrier"), uniform(count(frame), frame, "a count")
        barrier = frame.program.named_barrier(name)
        ticket = barrier.arrive(frame.active(), expected, frame)
        barrier.wait(ticket, f"named barrier {name}", expected, frame, where)

    return run


def _sync_participants(where: Location | None, frame: Frame) -> None:
    if frame.participants is not None:
        frame.participants.sync(frame, where)


@operation(tl.NAMED_BARRIER_ARRIVE)
def _named_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    named = NamedBarrier.of(call)
    number, count = compiler.expr(named.number), compiler.expr(named.count)

    def run(frame: Frame) -> None:
        name, expected = uniform(number(frame), frame, "a barrier"), uniform(count(frame), frame, "a count")
        frame.program.named_barrier(name).arrive(frame.active(), expected, frame)

    return run


@operation(tl.CLUSTER_SYNC, tl.CLUSTER_ARRIVE, tl.CLUSTER_ARRIVE_RELAXED, tl.CLUSTER_WAIT)
def _cluster_barrier(compiler: Compiler, call: ir.Call) -> Closure:
    arrives, waits = "wait" not in call.op.name, "arrive" not in call.op.name
    where = compiler.where

    def run(frame: Frame) -> None:
        cluster, own = frame.program.cluster, frame.own is None and "all" or frame.own.tobytes()
        expected = frame.threads * len(cluster.programs)
        key = (frame.unit.path(), own)
        if arrives:
            cluster.barrier.tickets[key] = cluster.barrier.arrive(frame.active(), expected, frame)
        if waits:
            cluster.barrier.wait(cluster.barrier.tickets[key], "its cluster's barrier", expected, frame, where)

    return run


@operation(tl.SYNC_GRID)
def _grid_barrier(compiler: Compiler, call: ir.Call) -> Closure:
    # Inside a parallel loop, iterations are executed, not threads, and idle threads are already at its end: all arrive.
    where, by_iterations = compiler.where, bool(compiler.axes)

    def run(frame: Frame) -> None:
        grid = frame.program.grid
        expected = frame.threads * grid.count
        ticket = grid.barrier.arrive(frame.threads if by_iterations else frame.active(), expected, frame)
        grid.barrier.wait(ticket, "the grid's barrier", expected, frame, where)

    return run


@operation(ops.BARRIER.name)
def _barrier(compiler: Compiler, call: ir.Call) -> Closure:
    level, where = Barrier.of(call).level, compiler.where
    return lambda frame: rendezvous(frame, level, "barrier", where, None, lambda _: None)
