# SPDX-License-Identifier: MIT
"""Operations of threads: indices, exchanges inside a warp, votes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import Quantifier, Shuffle, WarpIndex, brought_to, elected_of, operand_of, thread_axis
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, active, spread, uniform
from tilescale.backends.emulator.execute.observe import READ
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import value_dtype
from tilescale.backends.emulator.interpret.registry import ignore, value_operation
from tilescale.backends.emulator.operations.pointers import pointed
from tilescale.errors import UnsupportedError

ignore(
    # One unit runs at a time and copies complete at once: fences, commits and completion waits are no-ops.
    tl.FENCE_PROXY_ASYNC, tl.TMA_STORE_ARRIVE, tl.WAIT_TMA_STORES, tl.WARPGROUP_ARRIVE, tl.WAIT_WGMMA,
    tl.WARPGROUP_COMMIT_BATCH, tl.WARPGROUP_WAIT, tl.WARPGROUP_FENCE_OPERAND, tl.TCGEN05_BEFORE_THREAD_SYNC,
    tl.TCGEN05_AFTER_THREAD_SYNC, tl.PTX_COMMIT_GROUP, tl.PTX_WAIT_GROUP, tl.PTX_FENCE_BARRIER_INIT,
    tl.MBARRIER_EXPECT_TX, tl.SYNC_WARP, tl.WAIT_FOR_KERNEL_BEFORE, tl.PDL_TRIGGER, tl.DEALLOCATE_TMEM,
    # Hints.
    tl.SET_MAX_REGISTERS, tl.NO_SET_MAX_NREG, tl.PRODUCER_REGISTERS, tl.CONSUMER_REGISTERS,
    tl.PREFETCH_TMA_DESCRIPTOR, tl.PREFETCH, tl.TYPE_ANNOTATION,
)  # fmt: skip


def linear_thread(frame: Frame) -> np.ndarray:
    """The number of each thread of the program."""
    return np.arange(frame.threads, dtype=np.int32)


def _warp_size(compiler: Compiler, call: ir.Call) -> int:
    groups = [level.width for level in compiler.machine.levels if level.kind == "thread_group" and level.width > 1]
    if not groups:
        raise UnsupportedError(f"machine {compiler.machine.name!r} has no groups of threads that {call.op.name} needs")
    return groups[0]


@value_operation(tl.THREAD_INDEX)
def _thread_index(compiler: Compiler, call: ir.Call) -> Closure:
    axis = thread_axis(call)
    x, y, _ = compiler.launch.threads
    stride = (1, x, x * y)[axis]
    extent = compiler.launch.threads[axis]
    if extent == 1:
        return lambda frame: 0
    return lambda frame: linear_thread(frame) // stride % extent


@value_operation(tl.GET_LANE_IDX)
def _lane(compiler: Compiler, call: ir.Call) -> Closure:
    warp = WarpIndex.of(call).lanes or _warp_size(compiler, call)
    return lambda frame: linear_thread(frame) % warp


@value_operation(tl.GET_WARP_IDX, tl.GET_WARP_IDX_SYNC)
def _warp(compiler: Compiler, call: ir.Call) -> Closure:
    warp = WarpIndex.of(call).lanes or _warp_size(compiler, call)
    return lambda frame: linear_thread(frame) // warp


@value_operation(tl.GET_WARP_GROUP_IDX)
def _warp_group(compiler: Compiler, call: ir.Call) -> Closure:
    index = WarpIndex.of(call)
    size = (index.warps or 4) * (index.lanes or _warp_size(compiler, call))
    return lambda frame: linear_thread(frame) // size


@value_operation(tl.ELECT)
def _elect(compiler: Compiler, call: ir.Call) -> Closure:
    """Elect one thread of each group of that size; 0 means one of the whole program."""
    extent = elected_of(call)
    return lambda frame: linear_thread(frame) % (extent or frame.threads) == 0


@value_operation(tl.BLOCK_RANK_IN_CLUSTER)
def _cluster_rank(compiler: Compiler, call: ir.Call) -> Closure:
    return lambda frame: frame.program.cluster_rank


# -- exchanges ---------------------------------------------------------------------------------------------------------


def _shuffle(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        made, warp = Shuffle.of(call), _warp_size(compiler, call)
        value, lane, width = compiler.expr(made.value), compiler.expr(made.lane), made.width or warp

        def run(frame: Frame) -> np.ndarray:
            return numerics.shfl(np.array(spread(value(frame), frame)), lane(frame), width, kind, warp=warp)

        return run

    return rule


_SHUFFLES = {"shfl_sync": "idx", "shfl_up_sync": "up", "shfl_down_sync": "down", "shfl_xor_sync": "xor"}
for _name, _kind in _SHUFFLES.items():
    value_operation(tl.TL + _name)(_shuffle(_kind))
for _name, _kind in {"": "idx", "_up": "up", "_down": "down"}.items():
    value_operation(tl.WARP_SHUFFLE + _name)(_shuffle(_kind))


def _vote(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        predicate, warp = compiler.expr(brought_to(call)), _warp_size(compiler, call)

        def run(frame: Frame) -> np.ndarray:
            takes_part = active(frame)
            mask = numerics.vote(takes_part, kind="ballot", warp=warp)
            values = np.array(spread(predicate(frame), frame)) != 0
            return numerics.vote(values & takes_part, mask, kind, warp=warp)

        return run

    return rule


value_operation(tl.ANY_SYNC)(_vote("any"))
value_operation(tl.ALL_SYNC)(_vote("all"))
value_operation(tl.BALLOT_SYNC)(_vote("ballot"))
value_operation(tl.BALLOT)(_vote("ballot"))


@value_operation(tl.ACTIVEMASK)
def _activemask(compiler: Compiler, call: ir.Call) -> Closure:
    warp = _warp_size(compiler, call)
    return lambda frame: numerics.vote(active(frame), kind="ballot", warp=warp)


@value_operation(tl.MATCH_ANY_SYNC, tl.MATCH_ALL_SYNC)
def _match(compiler: Compiler, call: ir.Call) -> Closure:
    function = numerics.match_any if "any" in call.op.name else numerics.match_all
    value, warp = compiler.expr(brought_to(call)), _warp_size(compiler, call)
    return lambda frame: function(np.array(spread(value(frame), frame)), warp=warp)


def _warp_reduction(kind: str) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        value, dtype, warp = compiler.expr(operand_of(call)), value_dtype(call), _warp_size(compiler, call)
        return lambda frame: numerics.warp_reduce(
            np.array(spread(numerics.convert(value(frame), dtype), frame)), kind, warp=warp
        )

    return rule


for _kind in ("sum", "max", "min", "bitand", "bitor"):
    value_operation(tl.WARP_REDUCE + _kind)(_warp_reduction(_kind))


def _program_vote(combine: Callable[[np.ndarray], Any]) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        predicate = compiler.expr(operand_of(call))

        def run(frame: Frame) -> int:
            values = np.array(spread(predicate(frame), frame)) != 0
            frame.run.synchronizes(frame)
            return int(combine(values[active(frame)]))

        return run

    return rule


value_operation(tl.SYNCTHREADS_COUNT)(_program_vote(np.count_nonzero))
value_operation(tl.SYNCTHREADS_AND)(_program_vote(np.all))
value_operation(tl.SYNCTHREADS_OR)(_program_vote(np.any))


def _quantifier(combine: Callable[..., Any]) -> Callable[[Compiler, ir.Call], Closure]:
    """`T.any_of`, `T.all_of`: over consecutive elements of a tile in memory."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        made = Quantifier.of(call)
        first, count = pointed(compiler, made.first), compiler.expr(made.count)

        def run(frame: Frame) -> Any:
            array = first.home.array(frame)
            first.need(array)
            begin = np.ravel_multi_index([uniform(i(frame), frame, "an index") for i in first.indices], array.shape)
            lead, data = (array.lead, array.data) if first.home.private else ((), array)
            values = data.reshape(*lead, -1)[..., begin : begin + uniform(count(frame), frame, "a count")]
            if first.home.private:
                for place in range(begin, begin + values.shape[-1]):
                    first.home.touched_private(frame, READ, array, np.unravel_index(place, array.shape))
            else:
                first.home.touched(frame, READ, values)
            return combine(values != 0, axis=-1)

        return run

    return rule


value_operation(tl.ANY_OF)(_quantifier(np.any))
value_operation(tl.ALL_OF)(_quantifier(np.all))
