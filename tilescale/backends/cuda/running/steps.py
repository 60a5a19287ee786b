# SPDX-License-Identifier: MIT
"""A call in two halves: steps are bound to its arguments, once for the same ones; their launches are then repeated.

A step is a function of the call. It evaluates everything that arguments and host-level variables decide (regions,
peers, extents, loops) and returns launches, which only put work on the current stream. So they can be kept, repeated,
and captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tilelang_core import ir
from tilelang_core.formulas import Formula, formula
from tilescale.program import extents

StreamWork = Callable[[], Any]
"""Puts work on the current stream, and touches nothing else: a launch, a copy, a collective."""

HostVariables = dict[ir.Var, int | float]
"""Values of variables of the program that the host knows."""


@dataclass
class ProgramCall:
    """Arguments of a call, and values of host-level variables, which steps add to.

    `asked` are the variables on which bound work depends.

    The tensors among `values` do not keep the caller's memory alive: they represent any tensors at their addresses.
    """

    values: list[Any]
    variables: HostVariables = field(default_factory=dict)
    asked: set[ir.Var] = field(default_factory=set)

    def known(self, expr: Any) -> int | None:
        """An expression, or its formula, as a number, None if no host-level variables decide it; records the variables
        in `asked`. Steps have formulas, as it takes longer to look one up than to evaluate it."""
        made = expr if expr.__class__ is Formula else formula(expr)
        if not made.variables <= self.asked:
            self.asked |= made.variables
        value = made.value(self.variables)
        return extents.evaluate(made.expr, self.variables) if value is None else value

    def evaluate(self, expr: Any) -> int:
        """`known` for an expression that host-level variables decide."""
        number = self.known(expr)
        assert number is not None, f"{expr} is not known on the host"
        return number

    def later(self) -> ProgramCall:
        """This call with the present variables, for steps bound when the stream has reached them."""
        return ProgramCall(self.values, dict(self.variables), self.asked)


@dataclass(frozen=True)
class KernelLaunch:
    """A compiled kernel with its arguments, on a stream, None for the current one."""

    run: Callable[..., Any]
    arguments: list[Any]
    stream: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        if self.stream is None:
            self.run(*self.arguments)
            return
        with torch.cuda.stream(self.stream):
            self.run(*self.arguments)


CallStep = Callable[[ProgramCall], list[StreamWork]]
"""A part of the program as a function of the call: its launches, in order."""


def in_order(steps: list[CallStep]) -> CallStep:
    """Steps one after the other."""
    return lambda call: [launch for step in steps for launch in step(call)]


def copied(source: torch.Tensor, out: torch.Tensor) -> StreamWork:
    """A launch that copies `source` to `out`, which has as many elements in the same order."""
    if source.shape == out.shape:
        return partial(out.copy_, source)
    return lambda: out.copy_(source.reshape(out.shape))  # reshaping may copy


def moved(source: torch.Tensor, out: torch.Tensor) -> list[StreamWork]:
    """`copied`; nothing where both are the same memory, as a launch that adds no work would make an empty graph."""
    return [] if source.data_ptr() == out.data_ptr() else [copied(source, out)]


def run(launches: Iterable[StreamWork]) -> None:
    """Work in order."""
    for launch in launches:
        launch()
