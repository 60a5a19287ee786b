# SPDX-License-Identifier: MIT
"""Random programs as source text: a tree of lines, its parameters, how it is traced, emulated and made smaller."""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import tilescale
import tilescale.language as T
from tilescale.errors import TileScaleError

POISON = 77
"""Contents of outputs before a run. No program computes it: values lie in -32 .. 31, or are sums of them."""


@dataclass
class Line:
    """A line of source, and the lines in its block."""

    text: str
    body: list[Line] = field(default_factory=list)

    def render(self, depth: int) -> Iterator[str]:
        yield "    " * depth + self.text
        for line in self.body:
            yield from line.render(depth + 1)


@dataclass(frozen=True)
class Parameter:
    """A tensor of a program. Inputs hold small integers, outputs poison."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_input: bool = False

    def value(self, seed: int) -> torch.Tensor:
        """The tensor before a run."""
        kind = getattr(torch, self.dtype)
        if not self.is_input:
            return torch.full(self.shape, POISON, dtype=kind)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {self.name}".encode()))
        return torch.randint(-32, 32, self.shape, generator=generator).to(kind)


@dataclass(frozen=True)
class Fuzzed:
    """A program: what makes it, and its text."""

    seed: int
    devices: int
    parameters: tuple[Parameter, ...]
    body: tuple[Line, ...]

    @property
    def name(self) -> str:
        """The name of its function."""
        return f"fuzz_{self.devices}_{self.seed}"

    @property
    def source(self) -> str:
        """The text of the function."""
        types = [f"    {p.name}: T.Tensor({p.shape}, {p.dtype!r})," for p in self.parameters]
        lines = [text for line in self.body for text in line.render(1)]
        return "\n".join(["@T.prim_func", f"def {self.name}(", *types, "):", *lines, ""])

    def trace(self) -> Any:
        source = self.source
        file = f"<{self.name} {zlib.crc32(source.encode())}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        names: dict[str, Any] = {"T": T}
        exec(compile(source, file, "exec"), names)
        return names[self.name]

    def arguments(self, launch: int = 0) -> list[list[torch.Tensor]]:
        """Tensors for each device."""
        return [[p.value(16 * launch + rank) for p in self.parameters] for rank in range(self.devices)]

    def emulated(
        self, launch: int = 0, schedule_seed: int | None = None, check: str = "all", func: Any = None
    ) -> list[list[torch.Tensor]]:
        """Emulate a program; return the tensors of each device, or raise errors of the checks.

        Args:
            func: the traced function, if there is one.
        """
        args = self.arguments(launch)
        tilescale.emulate(func or self.trace(), args, check=check, time=False, schedule_seed=schedule_seed)
        return args

    def is_accepted(self) -> bool:
        """Whether it can be traced and passes the emulator's checks."""
        try:
            self.emulated()
        except (TileScaleError, NameError, SyntaxError, UnboundLocalError):
            return False
        return True


def smaller(program: Fuzzed, fails: Callable[[Fuzzed], bool], tries: int = 200) -> Fuzzed:
    """Shrink a failing program; tries at most `limit` programs."""
    at = 0
    while tries > 0:
        shorter = list(_without_one(program.body))[at:]
        if not shorter:
            return program
        tries -= 1
        candidate = replace(program, body=shorter[0])
        if candidate.is_accepted() and fails(candidate):
            program = candidate
        else:
            at += 1
    return program


def _without_one(lines: tuple[Line, ...]) -> Iterator[tuple[Line, ...]]:
    """The lines without one of them, whole blocks first, the last ones first; or with a block replaced by its body."""
    for at in reversed(range(len(lines))):
        before, line, behind = lines[:at], lines[at], lines[at + 1 :]
        yield (*before, *behind)
        for body in _without_one(tuple(line.body)):
            if body:
                yield (*before, Line(line.text, list(body)), *behind)
