# SPDX-License-Identifier: MIT
"""Thread-level operations: indices, exchanges inside a warp, atomics on elements, barriers of programs and clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.barriers import BarrierReference
from tilescale.backends.emulator.execute.frame import Frame, spread, uniform
from tilescale.backends.emulator.execute.observe import ATOMIC, ATOMIC_STORE, READ
from tilescale.backends.emulator.interpret.abstract import known_or_not
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import Closure, value_dtype
from tilescale.backends.emulator.interpret.registry import ignore, operation, value_operation
from tilescale.errors import UnsupportedError

ignore(
    # One unit runs at a time and copies complete at once: fences, commits and waits for completion order nothing more.
    "tl.fence_proxy_async", "tl.tma_store_arrive", "tl.tma_store_wait", "tl.warpgroup_arrive", "tl.wait_wgmma",
    "tl.warpgroup_commit_batch", "tl.warpgroup_wait", "tl.warpgroup_fence_operand", "tl.tcgen05_before_thread_sync",
    "tl.tcgen05_after_thread_sync", "tirx.ptx_commit_group", "tirx.ptx_wait_group", "tl.ptx_fence_barrier_init",
    "tl.mbarrier_expect_tx", "tl.sync_warp", "tl.pdl_sync", "tl.pdl_trigger", "tl.deallocate_tmem",
    # Hints.
    "tl.set_max_nreg", "tl.no_set_max_nreg", "tl.annotate_producer_reg_dealloc", "tl.annotate_consumer_reg_alloc",
    "tl.prefetch_tma_descriptor", "tirx.prefetch", "tirx.type_annotation",
)  # fmt: skip


def linear_thread(frame: Frame) -> np.ndarray:
    """The number of each thread of the program."""
    return np.arange(frame.threads, dtype=np.int32)


def _warp_size(compiler: Compiler, call: ir.Call, position: int = 0) -> int:
    if len(call.args) > position:
        return ir.constant(call.args[position])
    lanes = [level.threads for level in compiler.machine.levels if level.kind == "lanes" and level.threads > 1]
    if not lanes:
        raise UnsupportedError(f"machine {compiler.machine.name!r} has no groups of threads that {call.op.name} needs")
    return lanes[0]


@value_operation("tl.launch_thread_idx")
def _thread_index(compiler: Compiler, call: ir.Call) -> Closure:
    axis = ir.constant(call.args[0])
    x, y, _ = compiler.launch.threads
    stride = (1, x, x * y)[axis]
    extent = compiler.launch.threads[axis]
    if extent == 1:
        return lambda frame: 0
    return lambda frame: linear_thread(frame) // stride % extent


@value_operation("tl.get_lane_idx")
def _lane(compiler: Compiler, call: ir.Call) -> Closure:
    warp = _warp_size(compiler, call)
    return lambda frame: linear_thread(frame) % warp


@value_operation("tl.get_warp_idx", "tl.get_warp_idx_sync")
def _warp(compiler: Compiler, call: ir.Call) -> Closure:
    warp = _warp_size(compiler, call)
    return lambda frame: linear_thread(frame) // warp


@value_operation("tl.get_warp_group_idx")
def _warp_group(compiler: Compiler, call: ir.Call) -> Closure:
    warps = ir.constant(call.args[1]) if len(call.args) > 1 else 4
    size = warps * _warp_size(compiler, call)
    return lambda frame: linear_thread(frame) // size


@value_operation("tl.tl_shuffle_elect")
def _elect(compiler: Compiler, call: ir.Call) -> Closure:
    """One thread of each group of that many is elected; 0 means one of the whole program."""
    extent = ir.constant(call.args[0])
    return lambda frame: linear_thread(frame) % (extent or frame.threads) == 0


# -- exchanges ---------------------------------------------------------------------------------------------------------


def _shuffle(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        value, lane = compiler.expr(call.args[1]), compiler.expr(call.args[2])
        warp = _warp_size(compiler, call, 99)
        width = ir.constant(call.args[3]) if len(call.args) > 3 else warp

        def run(frame: Frame) -> np.ndarray:
            return numerics.shfl(np.array(spread(value(frame), frame)), lane(frame), width, kind, warp=warp)

        return run

    return rule


_SHUFFLES = {"shfl_sync": "idx", "shfl_up_sync": "up", "shfl_down_sync": "down", "shfl_xor_sync": "xor"}
for _name, _kind in _SHUFFLES.items():
    value_operation(f"tl.{_name}")(_shuffle(_kind))


def _active(frame: Frame) -> np.ndarray:
    return spread(True if frame.mask is None else frame.mask, frame)


def _vote(kind: str, has_mask: bool) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        predicate = compiler.expr(call.args[1 if has_mask else 0])
        warp = _warp_size(compiler, call, 99)

        def run(frame: Frame) -> np.ndarray:
            active = _active(frame)
            taking_part = numerics.vote(active, kind="ballot", warp=warp)
            values = np.array(spread(predicate(frame), frame)) != 0
            return numerics.vote(values & active, taking_part, kind, warp=warp)

        return run

    return rule


value_operation("tl.any_sync")(_vote("any", True))
value_operation("tl.all_sync")(_vote("all", True))
value_operation("tl.ballot_sync")(_vote("ballot", True))
value_operation("tl.ballot")(_vote("ballot", False))


@value_operation("tl.activemask")
def _activemask(compiler: Compiler, call: ir.Call) -> Closure:
    warp = _warp_size(compiler, call)
    return lambda frame: numerics.vote(_active(frame), kind="ballot", warp=warp)


@value_operation("tl.match_any_sync", "tl.match_all_sync")
def _match(compiler: Compiler, call: ir.Call) -> Closure:
    function = numerics.match_any if "any" in call.op.name else numerics.match_all
    value, warp = compiler.expr(call.args[1]), _warp_size(compiler, call, 99)
    return lambda frame: function(np.array(spread(value(frame), frame)), warp=warp)


def _warp_reduction(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        value, dtype = compiler.expr(call.args[0]), value_dtype(call)
        warp = _warp_size(compiler, call, 99)
        return lambda frame: numerics.warp_reduce(
            np.array(spread(numerics.convert(value(frame), dtype), frame)), kind, warp=warp
        )

    return rule


for _kind in ("sum", "max", "min", "bitand", "bitor"):
    value_operation(f"tl.warp_reduce_{_kind}")(_warp_reduction(_kind))


def _program_vote(combine: Callable[[np.ndarray], Any]) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        predicate = compiler.expr(call.args[0])

        def run(frame: Frame) -> int:
            values = np.array(spread(predicate(frame), frame)) != 0
            return int(combine(values[_active(frame)]))

        return run

    return rule


value_operation("tl.syncthreads_count")(_program_vote(np.count_nonzero))
value_operation("tl.syncthreads_and")(_program_vote(np.all))
value_operation("tl.syncthreads_or")(_program_vote(np.any))


def _quantifier(combine: Callable[..., Any]) -> Callable[[Compiler, ir.Call], Closure]:
    """`T.any_of`, `T.all_of`: over elements of a tile that follow one another in memory."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        first, count = pointed(compiler, call.args[0]), compiler.expr(call.args[1])

        def run(frame: Frame) -> Any:
            array = first.home.array(frame)
            first.need(array)
            begin = np.ravel_multi_index([uniform(i(frame), frame, "an index") for i in first.indices], array.shape)
            lead, data = (array.lead, array.data) if first.home.lanes else ((), array)
            values = data.reshape(*lead, -1)[..., begin : begin + uniform(count(frame), frame, "a count")]
            if first.home.lanes:
                for place in range(begin, begin + values.shape[-1]):
                    first.home.touched_lanes(frame, READ, array, np.unravel_index(place, array.shape))
            else:
                first.home.touched(frame, READ, values)
            return combine(values != 0, axis=-1)

        return run

    return rule


value_operation("tl.any_of")(_quantifier(np.any))
value_operation("tl.all_of")(_quantifier(np.all))


# -- atomics on elements -----------------------------------------------------------------------------------------------


def pointed(compiler: Compiler, pointer: Any) -> Element:
    """The element that `T.access_ptr(x[i], ...)` or `T.address_of(x[i])` points to.

    Raises:
        UnsupportedError: another kind of pointer.
    """
    while isinstance(pointer, ir.Call) and ir.op_name(pointer) in ("tl.access_ptr", "tirx.address_of"):
        pointer = pointer.args[0]
    if not isinstance(pointer, ir.BufferLoad):
        raise UnsupportedError(f"the emulator does not follow the pointer {pointer}")
    return compiler.element(pointer.buffer, pointer.indices)


def _atomic(op: str, returns: bool, lanes: int = 1) -> Callable[[Compiler, ir.Call], Closure]:
    """An update of `lanes` neighbouring elements; every active element of the space makes its own."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        target = pointed(compiler, call.args[0])
        if target.home.lanes:
            raise UnsupportedError(f"the emulator does not run atomics on thread-private memory ({target.home.name!r})")
        if lanes > 1:
            source = pointed(compiler, call.args[1])
            return lambda frame: _wide_atomic(target, source, lanes, op, frame)
        value = compiler.expr(call.args[1]) if op != "load" else lambda frame: 0
        order = _memory_order(call, 1 if op == "load" else 2)
        if not compiler.data:
            value = known_or_not(value)
        return lambda frame: _update(target, value(frame), op, order, returns, frame)

    return rule


_ORDERS = ("relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")


def _memory_order(call: ir.Call, position: int) -> str:
    """The memory order of an atomic, by TileLang's numbers; without one it is relaxed."""
    return _ORDERS[ir.constant(call.args[position]) if len(call.args) > position else 0]


def _update(target: Element, value: Any, op: str, order: str, returns: bool, frame: Frame) -> Any:
    array = target.home.array(frame)
    if not array.flags.writeable:  # a run without data
        return target.load(frame) if returns else None
    # Adding nothing is a way to look at memory: it must not wake those who wait for a change.
    if op != "load" and (op not in ("add", "or") or np.any(value)):
        target.home.written(frame)
    index = tuple(i(frame) for i in target.indices)
    result = _update_at(target, array, index, value, op, frame, returns)
    if frame.run.observers:
        taken = _active(frame) & target.inside(index, array.shape, frame)
        touched = tuple(spread(i, frame)[taken] for i in index)
        for observer in frame.run.observers:
            observer.orders(frame, array, touched, op, order)
    return result


def _update_at(
    target: Element, array: np.ndarray, index: tuple, value: Any, op: str, frame: Frame, returns: bool = False
) -> Any:
    taken = _active(frame) & target.inside(index, array.shape, frame)
    target.touched(frame, ATOMIC_STORE if op == "store" else ATOMIC, array, index, taken)
    if not taken.all():
        index = tuple(np.where(taken, i, 0) for i in index)
    index = tuple(spread(i, frame) for i in index)
    return numerics.atomic_update(array, index, value, op, mask=taken, return_prev=returns)


def _wide_atomic(target: Element, source: Element, lanes: int, op: str, frame: Frame) -> None:
    array = target.home.array(frame)
    if not array.flags.writeable:
        return
    target.home.written(frame)
    index = tuple(i(frame) for i in target.indices)
    values = neighbours(source, lanes, frame)
    for lane in range(lanes):
        _update_at(target, array, (*index[:-1], index[-1] + lane), values[lane], op, frame)


def neighbours(element: Element, count: int, frame: Frame) -> list[np.ndarray]:
    """The values of `count` elements that follow one another, for each element of the space."""
    array, index = element.home.array(frame), tuple(i(frame) for i in element.indices)
    return [spread(element.at(array, (*index[:-1], index[-1] + step), frame), frame) for step in range(count)]


for _op in ("add", "max", "min"):
    value_operation(f"tl.atomic_{_op}_elem_op")(_atomic(_op, False))
    value_operation(f"tl.atomic_{_op}_ret_elem_op")(_atomic(_op, True))
value_operation("tl.atomic_or_elem_op")(_atomic("or", False))
value_operation("tl.atomic_store_elem_op")(_atomic("store", False))
value_operation("tl.atomic_load_elem_op")(_atomic("load", True))
value_operation("tl.atomic_addx2_elem_op")(_atomic("add", False, lanes=2))
value_operation("tl.atomic_addx4_elem_op")(_atomic("add", False, lanes=4))


# -- barriers ----------------------------------------------------------------------------------------------------------


@operation("tl.mbarrier_wait_parity", "tirx.ptx_wait_barrier")
def _barrier_wait(compiler: Compiler, call: ir.Call) -> Closure:
    barrier, parity = BarrierReference(compiler, call.args[0]), compiler.expr(call.args[1])
    return lambda frame: barrier.of(frame).wait(uniform(parity(frame), frame, "a parity"), frame, barrier.where)


@operation(
    "tirx.ptx_arrive_barrier", "tirx.ptx_arrive_barrier_expect_tx", "tl.ptx_cp_async_barrier_noinc", collective=False
)
def _barrier_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    barrier = BarrierReference(compiler, call.args[0])
    return lambda frame: barrier.of(frame).arrive(frame.active(), frame, barrier.where)


@operation("tl.tcgen05_mma_arrive", collective=False)
def _mma_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    barrier = BarrierReference(compiler, call.args[0])
    return lambda frame: barrier.of(frame).arrive(1, frame, barrier.where)


@operation("tl.ptx_arrive_cluster_barrier", collective=False)
def _remote_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    barrier, rank = BarrierReference(compiler, call.args[0]), compiler.expr(call.args[1])

    def run(frame: Frame) -> None:
        program = frame.program.in_cluster(uniform(rank(frame), frame, "a rank in the cluster"))
        barrier.of(frame, program).arrive(frame.active(), frame, barrier.where)

    return run


@operation("tirx.tvm_storage_sync")
def _sync_threads(compiler: Compiler, call: ir.Call) -> Closure | None:
    """Threads of one coroutine run in step; a barrier that is named with a count meets other coroutines."""
    where = compiler.where
    if len(call.args) < 3:
        # Under a condition that tells lanes apart TileLang synchronises only those that meet it: the executing unit's.
        return (lambda frame: None) if compiler.lanes_apart else lambda frame: frame.crew.sync(frame, where)
    number, count = compiler.expr(call.args[1]), compiler.expr(call.args[2])

    def run(frame: Frame) -> None:
        name, expected = uniform(number(frame), frame, "a barrier"), uniform(count(frame), frame, "a count")
        barrier = frame.program.named_barrier(name)
        ticket = barrier.arrive(frame.active(), expected, frame)
        barrier.wait(ticket, f"named barrier {name}", expected, frame, where)

    return run


@operation("tl.named_barrier_arrive")
def _named_arrive(compiler: Compiler, call: ir.Call) -> Closure:
    number, count = compiler.expr(call.args[0]), compiler.expr(call.args[1])

    def run(frame: Frame) -> None:
        name, expected = uniform(number(frame), frame, "a barrier"), uniform(count(frame), frame, "a count")
        frame.program.named_barrier(name).arrive(frame.active(), expected, frame)

    return run


@operation("tl.cluster_sync", "tl.cluster_arrive", "tl.cluster_arrive_relaxed", "tl.cluster_wait")
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


@operation("tl.sync_grid")
def _grid_barrier(compiler: Compiler, call: ir.Call) -> Closure:
    where = compiler.where

    def run(frame: Frame) -> None:
        grid = frame.program.grid
        expected = frame.threads * grid.count
        ticket = grid.barrier.arrive(frame.active(), expected, frame)
        grid.barrier.wait(ticket, "the grid's barrier", expected, frame, where)

    return run


@value_operation("tl.block_rank_in_cluster")
def _cluster_rank(compiler: Compiler, call: ir.Call) -> Closure:
    return lambda frame: frame.program.cluster_rank
