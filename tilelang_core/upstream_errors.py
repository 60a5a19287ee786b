# SPDX-License-Identifier: MIT
"""Errors of TileLang and Python for programs that cannot be traced, with the user's line.

TileLang logs the rewritten source of such a program together with the error; it is shown at our logger's debug level.
The log call has the error at hand, which gets notes that Python prints after its message (from 3.11 on).
"""

from __future__ import annotations

import linecache
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import tilelang
from tilelang.language.eager import utils

from tilelang_core.logs import LOGGER

TILELANG_ROOT = str(Path(tilelang.__file__).parent)

_BUILDER = "__tb"
"""The name by which a function that TileLang has rewritten knows the builder."""

_MACRO = "    hint: if {!r} holds statements of the language, decorate it with @T.macro"
_TYPES = '    hint: give each parameter its type: `X: T.Tensor((n,), "float32")`, `n: T.int32`'


_stock_get_ast = utils.get_ast
_without_source: list[Callable[[Any], OSError]] = []
_explained: list[Callable[[Exception, str], Exception | None]] = []


def install() -> None:
    """Observe the log of TileLang's builder, and its failures to read sources."""
    logging.getLogger("tilelang.language.eager.builder").addFilter(_RewrittenErrors())
    utils.get_ast = _get_ast


def raises_without_source(make: Callable[[Any], OSError]) -> None:
    """Raise what `make` makes of a function whose source Python cannot read, in place of its bare OSError."""
    _without_source[:] = [make]


def explain_by(make: Callable[[Exception, str], Exception | None]) -> None:
    """Raise what `make` makes of an error in a traced function, and of the line's text, in its place; None: nothing."""
    _explained[:] = [make]


def explaining(function: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """A rewritten function of the user with explained errors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = linecache.getline(builder.current_file, builder.current_line).strip()
            found = [own for make in _explained if not hasattr(error, "where") and (own := make(error, text))]
            if found:
                raise found[0] from error
            raise

    return run


def _get_ast(func: Any) -> Any:
    try:
        return _stock_get_ast(func)
    except OSError as error:
        raise next((make(func) for make in _without_source), error) from None


class _RewrittenErrors(logging.Filter):
    """Drops rewritten sources, unless they are asked for; errors that do not end in the user's line get it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = sys.exc_info()[1]
        if error is not None:
            _explain(error)
        return record.levelno < logging.CRITICAL or logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)


def _explain(error: BaseException) -> None:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    traced = [number for number, frame in enumerate(frames) if is_traced(frame.f_code)]
    if not traced:
        if isinstance(error, TypeError) and frames[-1].f_code.co_filename.startswith((TILELANG_ROOT, __file__)):
            _note(error, _TYPES)  # the function was not even called
        return
    builder = frames[traced[-1]].f_locals[_BUILDER]
    file, line = builder.current_file, builder.current_line
    below = [frame.f_code for frame in frames[traced[-1] + 1 :]]
    place, text = f"{file}:{line}", linecache.getline(file, line).strip()
    if isinstance(error, AssertionError) and not str(error):
        error.args = (f"TileLang does not take this: {text} ({place})",)
    elif below and not hasattr(error, "where"):  # errors with a location need no note
        _note(error, f"    at {place}\n        {text}")
        helper = next((other.co_name for other in below if other.co_filename == file), None)
        if helper is not None and isinstance(error, TypeError | ValueError):
            _note(error, _MACRO.format(helper))


def is_traced(code: CodeType) -> bool:
    """Whether code is a function of the user that TileLang has rewritten."""
    return _BUILDER in code.co_freevars + code.co_varnames and not code.co_filename.startswith(TILELANG_ROOT)


def _note(error: BaseException, note: str) -> None:
    """Add a note; BaseException.add_note exists from Python 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
