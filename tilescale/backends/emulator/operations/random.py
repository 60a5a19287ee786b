# SPDX-License-Identifier: MIT
"""Random numbers of threads: `T.rng_init`, `T.rng_rand`, `T.rng_rand_float`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import RandomInit, distribution_of
from tilescale.backends.emulator.execute.frame import Frame, active, spread
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation, value_operation
from tilescale.backends.emulator.numerics.random import Philox
from tilescale.errors import UnsupportedError, UsageError
from tilescale.program.fragments import ThreadDistribution
from tilescale.program.parallel_loops import loops_of

_PHILOX = "curandStatePhilox4_32_10_t"


@operation(tl.RNG_INIT, collective=False)
def _init(compiler: Compiler, call: ir.Call) -> Closure:
    made = RandomInit.of(call)
    if made.generator != _PHILOX:
        raise UnsupportedError(f"the emulator has no generator {made.generator}", hint=f"it has {_PHILOX}")
    arguments = [compiler.expr(a) for a in (made.seed, made.sequence, made.offset)]

    def run(frame: Frame) -> None:
        if frame.program.random is None:
            frame.program.random = Philox(frame.threads)
        seed, sequence, offset = (np.array(spread(a(frame), frame)) for a in arguments)
        frame.program.random.seed(active(frame), seed, sequence, offset)

    return run


def _generators(frame: Frame) -> Philox:
    if frame.program.random is None:
        raise UsageError("a random number is taken before T.rng_init", hint="call T.rng_init(seed) first")
    return frame.program.random


def _drawn(compiler: Compiler, draw: Callable[[Philox, np.ndarray], np.ndarray]) -> Closure:
    """A random number for each thread, or for each iteration of parallel loops: a thread draws for its iterations in
    order.
    """
    if not compiler.axes:
        return lambda frame: draw(_generators(frame), active(frame))
    _check_loops(compiler)

    def run(frame: Frame) -> np.ndarray:
        wanted = active(frame).reshape(-1)
        count = wanted.size
        rounds = np.pad(wanted, (0, -count % frame.threads)).reshape(-1, frame.threads)
        drawn = [draw(_generators(frame), which) for which in rounds]
        return np.concatenate(drawn)[:count].reshape(frame.space)

    return run


def _check_loops(compiler: Compiler) -> None:
    """Check that a program's threads execute the parallel loops around one iteration at a time, and draw once in each.

    Raises:
        UnsupportedError: this does not hold for certain.
    """
    launch, step = compiler.launch, compiler.step
    known = ThreadDistribution.of(step, launch.thread_count, ())
    alone = compiler.executing == compiler.machine.program_level and not compiler.threads_apart
    if known is None or known.lengths != (1,) or not alone or launch.thread_count != launch.threads[0]:
        raise UnsupportedError(
            "random numbers in T.Parallel: which thread draws for which iteration is up to TileLang",
            hint="take a loop of as many iterations as threads, without fragments, or a loop of each thread: "
            "for i in T.serial(...)",
        )
    calls: list[ir.Call] = []
    ir.walk(step, lambda node: calls.append(node) if ir.op_name(node) in (tl.RNG_RAND, tl.RNG_RAND_FLOAT) else None)
    loops = [stmt for stmt in ir.statements(step) if isinstance(stmt, ir.For | ir.While)]
    if len(calls) > 1 or len(loops) > len(loops_of(step)):
        raise UnsupportedError(
            "several random numbers for an iteration of T.Parallel",
            hint="draw one in each of several loops, or in a loop of each thread: for i in T.serial(...)",
        )


@value_operation(tl.RNG_RAND)
def _rand(compiler: Compiler, call: ir.Call) -> Closure:
    return _drawn(compiler, Philox.words)


@value_operation(tl.RNG_RAND_FLOAT)
def _rand_float(compiler: Compiler, call: ir.Call) -> Closure:
    if str(call.dtype) != "float32":
        raise UnsupportedError(f"the emulator does not run T.rng_rand_float of {call.dtype}", hint="take 32 bits")
    return _drawn(compiler, Philox.normal if distribution_of(call) == "normal" else Philox.uniform)
