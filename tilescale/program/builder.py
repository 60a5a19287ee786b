# SPDX-License-Identifier: MIT
"""Programs by the function that builds them: found on disk by its name and arguments, they are not traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import torch

from tilelang_core import ir
from tilescale.program.ops import BUILDER

_PACKAGE = __name__.partition(".")[0]
_PLAIN = str, int, float, bool, type(None), torch.dtype
_DECLARATION = "declaration"

Builder = TypeVar("Builder", bound=Callable[..., ir.PrimFunc])


@dataclass(frozen=True)
class Declaration:
    """Properties of all programs of a builder, so that a dry run need not trace them.

    Attributes:
        output: position of the parameter with the first result.
        grids: the largest number of grids that its one launch becomes.
        results: number of results, by the arguments of the builder; parameters that follow them may be scratch memory.
    """

    output: int
    grids: int = 1
    results: Callable[..., int] = lambda *_: 1

    def outputs(self, arguments: tuple[Any, ...]) -> range:
        """Positions of the results of a program."""
        return range(self.output, self.output + self.results(*arguments))

    def __call__(self, function: Builder) -> Builder:
        """Declare them of a builder."""
        setattr(function, _DECLARATION, self)
        return function


@dataclass(frozen=True)
class ProgramBuilder:
    """A function that traces a program, and its arguments.

    The same function of this package builds the same program of the same arguments, for a machine and settings.
    """

    function: Callable[..., ir.PrimFunc]
    arguments: tuple[Any, ...]

    @cached_property
    def name(self) -> str:
        """As `call_name`."""
        return call_name(self.function, self.arguments)

    @property
    def declaration(self) -> Declaration | None:
        """The function's; None where a program has to be traced."""
        return getattr(self.function, _DECLARATION, None)

    def build(self) -> ir.PrimFunc:
        """The program, traced for the current machine."""
        func = self.function(*self.arguments)
        return func.with_attr(BUILDER, self.name) if self.name else func


def call_name(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """A call as text, the same in each process: "" for other callables than functions of this package, and for
    arguments that are neither such functions nor plain data."""
    try:
        return f"{_path(function)}{_text(arguments)}"
    except TypeError:
        return ""


def _path(function: Callable[..., Any]) -> str:
    path = f"{function.__module__}.{getattr(function, '__qualname__', '<callable>')}"
    if path.partition(".")[0] != _PACKAGE or "<" in path:
        raise TypeError(f"{function!r} is no function of this package")
    return path


def _text(value: Any) -> str:
    """Plain data, or a function, as text. Raises TypeError for anything else."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if is_dataclass(value):
        return f"{type(value).__qualname__}{_text(tuple(getattr(value, field.name) for field in fields(value)))}"
    if isinstance(value, FunctionType):
        return _path(value)
    if type(value) not in _PLAIN:
        raise TypeError(f"{value!r} is not plain data")
    return repr(value)


def builder_name(func: ir.PrimFunc) -> str:
    """The name of the builder that traced a program; "" without one."""
    return str(func.attrs[BUILDER]) if func.attrs and BUILDER in func.attrs else ""
