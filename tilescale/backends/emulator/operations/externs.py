# SPDX-License-Identifier: MIT
"""Functions that TileLang calls by name: `T.dp4a`, `T.print`; and `T.device_assert`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import Assertion, Extern, operand_of
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, check, is_vector, spread
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import operation, value_operation
from tilescale.backends.emulator.operations.pointers import neighbours, pointed
from tilescale.backends.emulator.operations.stand_ins import call_stand_in


@operation(tl.CALL_EXTERN, tl.CALL_PURE_EXTERN, collective=False)
def _statement(compiler: Compiler, call: ir.Call) -> Closure:
    """Calls used as statements: the result is ignored."""
    return _extern(compiler, call, "handle")


@value_operation(tl.CALL_EXTERN, tl.CALL_PURE_EXTERN)
def _value(compiler: Compiler, call: ir.Call) -> Closure:
    return _extern(compiler, call, str(call.dtype))


def _extern(compiler: Compiler, call: ir.Call, dtype: str) -> Closure:
    """TileLang's own functions, and those for which the user has a stand-in."""
    made = Extern.of(call)
    rule = _EXTERNS.get(made.name)
    if rule is not None:
        return rule(compiler, made.arguments)
    return call_stand_in(compiler, made.name, made.arguments, dtype)


def _dp4a(compiler: Compiler, args: list[Any]) -> Closure:
    *factors, total = args
    sides, c = [neighbours(compiler, pointer, 4) for pointer in factors], pointed(compiler, total)
    dot = numerics.INTRINSICS[tl.DP4A]

    def run(frame: Frame) -> None:
        left, right = (np.ascontiguousarray(np.stack(side(frame), axis=-1)).view(np.int32)[..., 0] for side in sides)
        c.store(frame, dot(left, right, c.load(frame), dtype=c.home.dtype))

    return run


def _print(text: Callable[..., str]) -> Callable[[Compiler, list[Any]], Closure]:
    """Print one line for each unit, with the values of all its active threads where they differ."""

    def rule(compiler: Compiler, args: list[Any]) -> Closure:
        values = [compiler.expr(a) for a in args]

        def run(frame: Frame) -> None:
            if frame.mask is None or np.any(frame.mask):
                print(f"{frame.unit}: {text(*[_shown(v(frame), frame) for v in values])}")

        return run

    return rule


def _shown(value: Any, frame: Frame) -> Any:
    if not is_vector(value):
        return value
    picked = spread(value, frame)
    return picked.tolist() if frame.mask is None else picked[spread(frame.mask, frame)].tolist()


def _sleep(compiler: Compiler, args: list[Any]) -> Closure:
    """Let others run; the duration is not modelled."""
    return lambda frame: frame.run.scheduler.yield_control()


_EXTERNS: dict[str, Callable[[Compiler, list[Any]], Closure]] = {
    "DP4A": _dp4a,
    "__nanosleep": _sleep,
    "debug_print_msg": _print(lambda message: message),
    "debug_print_var": _print(lambda message, value: f"{message + ' ' if message else ''}{value}"),
    "debug_print_buffer_value": _print(lambda message, name, i, value: f"{message} {name}[{i}] = {value}"),
}


@operation(tl.DEVICE_ASSERT, tl.DEVICE_ASSERT_WITH_MSG, collective=False)
def _assert(compiler: Compiler, call: ir.Call) -> Closure:
    made = Assertion.of(call)
    condition = compiler.expr(made.condition)
    return lambda frame: check(condition(frame), made.message, frame)


@operation(tl.ASSUME, collective=False)
def _assume(compiler: Compiler, call: ir.Call) -> Closure:
    """Check an assumption that TileLang may rely on; a run without data cannot check it."""
    if not compiler.data:
        return lambda frame: None
    condition, said = compiler.expr(operand_of(call)), f"T.assume({operand_of(call)})"
    return lambda frame: check(condition(frame), said, frame)
