# SPDX-License-Identifier: MIT
"""Faults of TileScale's own code as errors that ask for a report, with the line of the program that shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tilelang_core import ir
from tilelang_core.prefixes import first_failing
from tilescale.errors import InternalError, Location, TileScaleError, UsageError
from tilescale.program.model import location

NO_FAULTS = (TileScaleError, OSError, MemoryError)
"""Exceptions that are raised unchanged."""


def fault(error: Exception, doing: str = "compiled") -> TileScaleError:
    """The user's error for an exception of our own code: InternalError, but for TVM's rejections of user code."""
    if "Divide by zero" in str(error):
        return UsageError("a number is divided by 0", hint="let the divisor of indices and extents be another number")
    return InternalError(
        f"TileScale failed while it {doing} this: {type(error).__name__}: {error}",
        hint="report it with the program and the whole traceback: the program may be right",
    )


def line_of_failure(
    func: ir.PrimFunc, run: Callable[[ir.PrimFunc], object], alike: Callable[[Exception], bool]
) -> Location | None:
    """The line of the first statement with which `run` of a function fails in the same way; None if there is none."""

    def fails(candidate: ir.PrimFunc) -> bool:
        try:
            run(candidate)
        except Exception as error:
            return alike(error)
        return False

    stmt = first_failing(func, fails)
    return None if stmt is None else location(stmt)


@contextlib.contextmanager
def faults_reported(func: ir.PrimFunc, run: Callable[[ir.PrimFunc], object]) -> Iterator[None]:
    """Replace unexpected exceptions by the error that `fault` makes.

    Args:
        func: the function under analysis.
        run: does the same with another function.
    """
    try:
        yield
    except NO_FAULTS:
        raise
    except Exception as error:
        meant = fault(error)
        where = line_of_failure(func, run, lambda other: fault(other).message == meant.message)
        raise meant.at(*filter(None, [where or first_line(func)])) from error


@contextlib.contextmanager
def emulation_faults_reported(where: Callable[[], Location | None]) -> Iterator[None]:
    """Replace unexpected exceptions of an emulation by the error that `fault` makes, with a line."""
    try:
        yield
    except NO_FAULTS:
        raise
    except Exception as error:
        raise fault(error, "emulated").at(*filter(None, [where()])) from error


def first_line(func: ir.PrimFunc) -> Location | None:
    return next(filter(None, map(location, ir.statements(func.body))), None)
