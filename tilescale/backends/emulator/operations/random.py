# SPDX-License-Identifier: MIT
"""Random numbers of threads: `T.rng_init`, `T.rng_rand`, `T.rng_rand_float`."""

from __future__ import annotations

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import RandomInit, distribution_of
from tilescale.backends.emulator.execute.frame import Frame, active, spread
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation, value_operation
from tilescale.backends.emulator.numerics.random import Philox
from tilescale.errors import UnsupportedError, UsageError

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


def _check_threads(compiler: Compiler) -> None:
    if compiler.axes:
        raise UnsupportedError(
            "random numbers in T.Parallel: which thread draws for which iteration is up to TileLang",
            hint="draw in a loop of each thread: for i in T.serial(...)",
        )


@value_operation(tl.RNG_RAND)
def _rand(compiler: Compiler, call: ir.Call) -> Closure:
    _check_threads(compiler)
    return lambda frame: _generators(frame).words(active(frame))


@value_operation(tl.RNG_RAND_FLOAT)
def _rand_float(compiler: Compiler, call: ir.Call) -> Closure:
    _check_threads(compiler)
    if str(call.dtype) != "float32":
        raise UnsupportedError(f"the emulator does not run T.rng_rand_float of {call.dtype}", hint="take 32 bits")
    if distribution_of(call) == "normal":
        return lambda frame: _generators(frame).normal(active(frame))
    return lambda frame: _generators(frame).uniform(active(frame))
