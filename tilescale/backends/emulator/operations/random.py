# SPDX-License-Identifier: MIT
"""Random numbers of threads: `T.rng_init`, `T.rng_rand`, `T.rng_rand_float`."""

from __future__ import annotations

import functools

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import RandomInit, distribution_of
from tilescale.backends.emulator.execute.frame import Frame, active, spread
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.draws import DrawOrder, draws_of
from tilescale.backends.emulator.interpret.registry import operation, value_operation
from tilescale.backends.emulator.numerics.mrg32k3a import Mrg32k3a
from tilescale.backends.emulator.numerics.random import Generators, Philox
from tilescale.backends.emulator.numerics.xorwow import Xorwow
from tilescale.errors import UnsupportedError, UsageError

_GENERATORS: dict[str, type[Generators]] = {
    "curandStatePhilox4_32_10_t": Philox,
    "curandStateXORWOW_t": Xorwow,
    "curandStateMRG32k3a_t": Mrg32k3a,
}


@operation(tl.RNG_INIT, collective=False)
def _init(compiler: Compiler, call: ir.Call) -> Closure:
    if compiler.axes:
        raise UnsupportedError("T.rng_init in T.Parallel", hint="each thread has a generator: call it before the loop")
    made = RandomInit.of(call)
    kind, arguments = _GENERATORS[made.generator], [compiler.expr(a) for a in (made.seed, made.sequence, made.offset)]
    compiler.generator = call  # of all draws behind it in the text, also where a branch leaves it out

    def run(frame: Frame) -> None:
        if call not in frame.program.random:
            frame.program.random[call] = kind(frame.threads)
        seed, sequence, offset = (np.array(spread(a(frame), frame)) for a in arguments)
        frame.program.random[call].seed(active(frame), seed, sequence, offset)

    return run


def _draw(compiler: Compiler, call: ir.Call, kind: str) -> Closure:
    """A random number for each thread, or for each iteration of parallel loops."""
    init, dtype = compiler.generator, np.dtype(str(call.dtype))

    def vector(frame: Frame, lanes: int, which: np.ndarray) -> np.ndarray:
        made: Generators | None = frame.program.random.get(init)
        if made is None or (which & ~made.seeded).any():
            raise UsageError("a random number is taken before T.rng_init", hint="call T.rng_init(seed) first")
        return made.vector(kind, dtype, lanes, which)

    if compiler.axes:
        if compiler.draws is None:
            compiler.draws = DrawOrder.of(compiler, call)
        order = compiler.draws
        return lambda frame: order.drawn(frame, functools.partial(vector, frame))
    _check_lanes(compiler, call, kind, dtype)
    return lambda frame: np.where(active(frame), vector(frame, 1, active(frame))[0], dtype.type(0))


def _check_lanes(compiler: Compiler, call: ir.Call, kind: str, dtype: np.dtype) -> None:
    """Check that a thread does not draw a vector, whose numbers are others. Raises UnsupportedError: it does, as
    TileLang lowers it."""
    made = _GENERATORS[RandomInit.of(compiler.generator).generator] if compiler.generator is not None else Philox
    if any(made.has_vectors(kind, dtype, lanes) for lanes in (2, 4)):
        lanes = draws_of(compiler).lanes.get(call, 1)
        if made.has_vectors(kind, dtype, lanes):
            raise UnsupportedError(
                f"a vector of {lanes} random numbers of a thread",
                hint="take for i in T.serial(...) in place of T.vectorized, or T.Parallel",
            )


@value_operation(tl.RNG_RAND)
def _rand(compiler: Compiler, call: ir.Call) -> Closure:
    return _draw(compiler, call, "word")


@value_operation(tl.RNG_RAND_FLOAT)
def _rand_float(compiler: Compiler, call: ir.Call) -> Closure:
    return _draw(compiler, call, distribution_of(call))
