# SPDX-License-Identifier: MIT
"""Errors of Python, TileLang and TVM for common mistakes in a traced function, as errors with the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from tilelang_core import stock, upstream_errors
from tilescale.errors import ShapeError, TileScaleError, UsageError, did_you_mean
from tilescale.language.context import here


@dataclass(frozen=True)
class Mistake:
    """A mistake, by a part of the message of its error; {0} is the first group of the part."""

    part: str
    error: type[TileScaleError]
    message: str
    hint: str


_VALUE = "a tensor or tile is used as a value, which only its elements are"
_ELEMENTS = "compute its elements: for i in T.Parallel(n): t[i] = {}"
_INDEX = ShapeError, "an index of {0} needs {1} dimensions, and has {2}", "write an index, or a slice, for each of them"
_KNOWN = (
    Mistake(r"for @: .*'Buffer'", UsageError, _VALUE, "a product of tiles is a statement: T.gemm(a, b, c)"),
    Mistake(r"operand type.* for .*'Buffer'", UsageError, _VALUE, _ELEMENTS.format("2 * t[i]")),
    Mistake(r"not supported between instances of .*'Buffer'", UsageError, _VALUE, "compare elements: if t[i] > 0"),
    Mistake(r"Attempting to update buffer", UsageError, _VALUE, _ELEMENTS.format("t[i] + 1")),
    Mistake(r"must be Tensor, not Buffer", UsageError, _VALUE, _ELEMENTS.format("T.max(t[i], 0)")),
    Mistake(r"got `tirx\.Buffer`", UsageError, _VALUE, _ELEMENTS.format("T.exp(t[i])")),
    Mistake(
        r"'Buffer' object has no attribute '(\w+)'",
        UsageError,
        "tensors and tiles of a traced function have no {0}",
        "use T.copy, T.fill, T.reduce_sum, ... in place of methods of a torch.Tensor",
    ),
    Mistake(r"Buffer (\w+) is (\d+)-dimensional, cannot be indexed with the (\d+)-dimensional", *_INDEX),
    Mistake(r"Buffer (\w+) is (\d+)-dimensional .*, but (\d+) index", *_INDEX),
    Mistake(
        r"Immutable variable `(\w+)` is used outside its defining region",
        UsageError,
        "{0} is used outside of the block of statements that defines it",
        "tiles and names of a T.Kernel, T.Scale or loop end with it: pass results in a tensor parameter, or define the "
        "name before",
    ),
)
"""The first one counts whose part is found."""

_CALL = re.compile(r"^(\w+)\(\) ((?:got an unexpected keyword argument '(\w+)'|missing|takes).*)")


def _explained(error: Exception, line: str) -> TileScaleError | None:
    """The error for a mistake in a line of a traced function; None for other errors."""
    text = str(error)
    if isinstance(error, TypeError) and (call := _CALL.match(text)) and f".{call[1]}(" in line:
        return _wrong_call(call, getattr(stock.module, call[1], None))
    if isinstance(error, ValueError) and "values to unpack" in text and "Kernel(" in line:
        hint = "a name for each extent: T.Kernel(gx) as bx, T.Kernel(gx, gy) as (bx, by)"
        return UsageError(f"T.Kernel has as many indices as extents: {text}", hint=hint, where=here())
    for known in _KNOWN:
        if found := re.search(known.part, text):
            return known.error(known.message.format(*found.groups()), hint=known.hint, where=here())
    return None


def _wrong_call(call: re.Match[str], function: Callable | None) -> UsageError | None:
    """The error for arguments that a function of the language does not take."""
    if function is None:
        return None
    parameters = list(inspect.signature(function).parameters)
    hint = did_you_mean(call[3], parameters) if call[3] else ""
    return UsageError(f"T.{call[1]} {call[2]}", hint=f"{hint}it takes {', '.join(parameters)}", where=here())


upstream_errors.explain_by(_explained)
