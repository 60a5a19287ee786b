# SPDX-License-Identifier: MIT
"""A TileScale program of all PEs: what the blocks of each device do, one line after the other, and its run.

A PE is a device. What happens at a PE at the same time is a block each (`Unit`); events order them: flags that one
signals and the other waits for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


class InexpressibleError(Exception):
    """A program does what has no counterpart in the language, or none with the same meaning."""


@dataclass(eq=False)
class Memory:
    """A variable that others may reach: a tensor of every device.

    Attributes:
        first: what it holds when the program begins, by device; zero elsewhere.
        views: other types that it is accessed with.
    """

    name: str
    dtype: str
    size: int = 1
    first: dict[int, Any] = field(default_factory=dict)
    views: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Pointer:
    """An element of a variable, as a type."""

    memory: Memory
    offset: int = 0
    dtype: str = ""

    @property
    def name(self) -> str:
        """The tensor, or a view of it, that the element lies in."""
        return self.memory.name if self.dtype in ("", self.memory.dtype) else f"{self.memory.name}_{self.dtype}"

    def region(self, count: int) -> str:
        """Memory from `elements` elements after this one on."""
        return f"{self.name}[{self.offset}:{self.offset + count}]"

    def __str__(self) -> str:
        return f"{self.name}[{self.offset}]"

    @property
    def of(self) -> str:
        return self.dtype or self.memory.dtype

    def cast(self, dtype: str) -> Pointer:
        """The same place as another type."""
        if dtype != self.memory.dtype:
            self.memory.views.add(dtype)
        widths = [torch.tensor([], dtype=getattr(torch, each)).itemsize for each in (self.of, dtype)]
        return Pointer(self.memory, self.offset * widths[0] // widths[1], dtype)


@dataclass(frozen=True)
class Sync:
    """The members of a team come together: the team, and which time it is."""

    members: tuple[int, ...]
    time: int


@dataclass(eq=False)
class Unit:
    """A block of a PE's device, and its statements with the lines that they stand for."""

    pe: int
    number: int
    lines: list[tuple[int, str | Sync]] = field(default_factory=list)

    def add(self, line: int, *texts: str | Sync) -> None:
        self.lines += [(line, text) for text in texts]


class World:
    """All PEs of a program.

    Attributes:
        size: how many there are.
        units: those of each PE; the first one is the PE's main thread.
    """

    def __init__(self, size: int):
        self.size = size
        self.units = [[Unit(pe, 0)] for pe in range(size)]
        self._memory: dict[str, Memory] = {}
        self._tiles: set[tuple[str, int]] = set()
        self._flags: dict[Hashable, int] = {}
        self._syncs: Counter[tuple[int, tuple[int, ...]]] = Counter()

    # -- what threads add ----------------------------------------------------------------------------------------------

    def unit(self, pe: int) -> Unit:
        """A new block of a PE."""
        self.units[pe].append(Unit(pe, len(self.units[pe])))
        return self.units[pe][-1]

    def memory(self, name: str, dtype: str, size: int = 1) -> Memory:
        """The variable of that name, the same for all PEs."""
        return self._memory.setdefault(name, Memory(name, dtype, size))

    def stage(self, dtype: str, size: int) -> Pointer:
        """Memory that only the requesting PE knows of."""
        return Pointer(self.memory(f"stage{len(self._memory)}", dtype, size))

    def tile(self, dtype: str, size: int) -> str:
        """A block's own tile."""
        self._tiles.add((dtype, size))
        return f"tile_{dtype}_{size}"

    def flag(self, of: Hashable = None) -> str:
        """A flag: a new one, or that of a thing."""
        return f"F[{self._flags.setdefault(of or len(self._flags), len(self._flags))}]"

    def sync(self, pe: int, members: tuple[int, ...]) -> Sync:
        """The next time that a PE comes together with others."""
        self._syncs[pe, members] += 1
        return Sync(members, self._syncs[pe, members])

    # -- text ----------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The program; each line ends with the line of C that it stands for."""
        parameters = [f'{m.name}: T.Tensor(({m.size},), "{m.dtype}")' for m in self._memory.values()]
        blocks = max(map(len, self.units))
        inner = [line for number in range(blocks) for line in self._block(number)]
        head = [
            "import tilescale.language as T",
            "",
            "",
            "@T.prim_func",
            f"def program({', '.join(parameters)}):",
            f"    with T.Kernel(device={self.size}, block={blocks}, threads=1) as b:",
            f"        F = T.alloc_flags({max(1, len(self._flags))})",
            *(f"        {line}" for line in self._views()),
            '        with T.Scale("block"):',
            *(
                f'            tile_{dtype}_{size} = T.alloc(({size},), "{dtype}")'
                for dtype, size in sorted(self._tiles)
            ),
            '            ticket = T.alloc_var("int64", init=0)',
            '            with T.Scale("device") as (rank, _):',
        ]
        return "\n".join([*head, *(f"                {line}" for line in inner)]) + "\n"

    def _views(self) -> Iterator[str]:
        for memory in self._memory.values():
            size = memory.size * torch.tensor([], dtype=getattr(torch, memory.dtype)).itemsize
            for dtype in sorted(memory.views):
                extent = size // torch.tensor([], dtype=getattr(torch, dtype)).itemsize
                yield f'{memory.name}_{dtype} = T.view({memory.name}, ({extent},), "{dtype}")'

    def _block(self, number: int) -> Iterator[str]:
        """Statements of the blocks of a number, on all devices."""
        units = [units[number] for units in self.units if number < len(units)]
        parts = [self._parts(unit) for unit in units]
        yield f"if b == {number}:"
        for i in range(max(map(len, parts))):
            if i > 0:
                yield "    T.barrier()"
            for unit, part in zip(units, parts, strict=True):
                if i < len(part) and part[i]:
                    yield f"    if rank == {unit.pe}:"
                    yield from (f"        {text}  # {line}" for line, text in part[i])
        yield "    T.evaluate(0)"

    def _parts(self, unit: Unit) -> list[list[tuple[int, str]]]:
        """A unit's lines from one barrier to the next."""
        parts: list[list[tuple[int, str]]] = [[]]
        for line, text in unit.lines:
            if not isinstance(text, Sync):
                parts[-1].append((line, text))
            elif self._is_barrier(text):
                parts.append([])
            else:
                flag = self.flag(text)
                parts[-1] += [(line, f"T.signal({flag}, dst={pe})") for pe in text.members]
                parts[-1].append((line, f'T.wait({flag}, ">=", {len(text.members)})'))
        return parts

    def _is_barrier(self, sync: Sync) -> bool:
        """Whether the main threads of all PEs come together, outside of what only some of them do."""
        return all(any(text == sync for _, text in units[0].lines) for units in self.units)

    # -- run -----------------------------------------------------------------------------------------------------------

    def arguments(self) -> list[list[torch.Tensor]]:
        """New tensors for each device."""
        return [[_filled(memory, pe) for memory in self._memory.values()] for pe in range(self.size)]


def _filled(memory: Memory, pe: int) -> torch.Tensor:
    found = torch.zeros(memory.size, dtype=getattr(torch, memory.dtype))
    found[0] = memory.first.get(pe, 0)
    return found


def load(path: Path) -> Any:
    """The traced function of a file with a program's text."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.program


def line_of_c(path: Path, line: int) -> int:
    """The line of C that a line of a program's text stands for."""
    return int(path.read_text(encoding="utf-8").splitlines()[line - 1].rpartition("# ")[2])
