# SPDX-License-Identifier: MIT
"""Programs by the function that builds them: found on disk by its name and arguments, they are not traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, TypeVar

from tilelang_core import ir
from tilescale.program.ops import BUILDER

_PACKAGE = __name__.partition(".")[0]
_PLAIN = str, int, float, bool, type(None)
_OUTPUT = "declared_output"

Builder = TypeVar("Builder", bound=Callable[..., ir.PrimFunc])


def output_at(position: int) -> Callable[[Builder], Builder]:
    """Declare that a function builds programs of one launch, whose result is the parameter at `position`.

    A dry run sets it to zero, and need not trace such a program. Later parameters may be scratch memory.
    """

    def declared(function: Builder) -> Builder:
        setattr(function, _OUTPUT, position)
        return function

    return declared


@dataclass(frozen=True)
class ProgramBuilder:
    """A function that traces a program, and its arguments.

    The same function of this package builds the same program of the same arguments, for a machine and settings.
    """

    function: Callable[..., ir.PrimFunc]
    arguments: tuple[Any, ...]

    @cached_property
    def name(self) -> str:
        """The function and its arguments as text; "" for other callables than functions of this package, and for
        arguments that are not plain data."""
        path = f"{self.function.__module__}.{getattr(self.function, '__qualname__', '<callable>')}"
        if path.partition(".")[0] != _PACKAGE or "<" in path:
            return ""
        try:
            return f"{path}{_text(self.arguments)}"
        except TypeError:
            return ""

    @property
    def declared_output(self) -> int | None:
        """The position that `output_at` declares; None without it."""
        return getattr(self.function, _OUTPUT, None)

    def build(self) -> ir.PrimFunc:
        """The program, traced for the current machine."""
        func = self.function(*self.arguments)
        return func.with_attr(BUILDER, self.name) if self.name else func


def _text(value: Any) -> str:
    """Plain data as text. Raises TypeError for anything else."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if is_dataclass(value):
        return f"{type(value).__qualname__}{_text(tuple(getattr(value, field.name) for field in fields(value)))}"
    if type(value) not in _PLAIN:
        raise TypeError(f"{value!r} is not plain data")
    return repr(value)


def builder_name(func: ir.PrimFunc) -> str:
    """The name of the builder that traced a program; "" without one."""
    return str(func.attrs[BUILDER]) if func.attrs and BUILDER in func.attrs else ""
