# SPDX-License-Identifier: MIT
"""Launches as a CUDA graph that serves calls whose tensors lie elsewhere, or which pass other scalars.

Where tensors lie is in what kernels and copies are passed: as pointers, in structures, in descriptors of bulk copies.
Which of these bytes are places of arguments two captures say, of calls with tensors in different places: the graph
serves other places if it differs from the second capture in nothing else. From then on a call that moves costs what it
takes to set some nodes of the graph, and nothing is bound, captured, or instantiated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.graph_nodes import Node, nodes_of
from tilescale.backends.cuda.running.own_streams import own_stream
from tilescale.backends.cuda.running.steps import Work, run
from tilescale.errors import DeviceError
from tilescale.program.model import Program

if TYPE_CHECKING:
    import torch

_WORD = 8
"""Bytes of an address, and what it is aligned to."""

Given = tuple[Any, ...]
"""What a call passes: of each tensor its address, of each scalar that kernels take its value; None for others."""

Kind = int | np.dtype | None
"""Of what a call passes: the bytes of a tensor, or the type of a scalar."""


def kinds_of(program: Program, values: Sequence[Any], passed: Container[int]) -> list[Kind]:
    """Of a call's arguments, of which those at some positions are scalars that kernels take."""
    found: list[Kind] = []
    for i, (parameter, value) in enumerate(zip(program.parameters, values, strict=True)):
        if parameter.buffer is not None:
            found.append(0 if value is None else value.nbytes)
        else:
            found.append(_type(str(parameter.var.dtype)) if i in passed else None)
    return found


def _type(name: str) -> Kind:
    try:
        return np.dtype(name)
    except TypeError:  # of none of NumPy's: it is not found in what kernels are passed
        return None


class Site(NamedTuple):
    """Bytes of a node that an argument decides.

    Attributes:
        block: the parameter; `at` is the first byte in it.
        position: of the argument.
        offset: what is added to the address; None for a scalar.
    """

    block: int
    at: int
    position: int
    offset: int | None


class Replay:
    """The graph of a call's launches, instantiated."""

    def __init__(self, launches: Sequence[Work], given: Given, kinds: Sequence[Kind]) -> None:
        """Capture them; nothing runs yet."""
        self._graph = captured(launches)
        self._graph.instantiate()
        self._executable, self._start = _executable(self._graph), driver.function("cuGraphLaunch")
        self._nodes = nodes_of(self._graph.raw_cuda_graph())
        self._given, self._kinds = given, kinds
        self._sites: dict[int, set[Site]] = {}
        self._together: list[tuple[int, int]] = []  # tensors of which one lies in the other
        self._known: set[int] = set()  # positions whose sites are known
        self._is_fixed = False

    def moved(self, given: Given, launches: Callable[[], Sequence[Work]]) -> bool:
        """Let the next replay be for another call; False if the graph cannot serve it, and is as it was.

        `launches` binds that call, for the first one that shows what moves.
        """
        if given == self._given:
            return True
        if self._is_fixed:
            return False
        changed = {i for i, (now, was) in enumerate(zip(given, self._given, strict=True)) if now != was}
        if not changed <= self._known:
            other = captured(launches())
            if not self._learn(given, changed, nodes_of(other.raw_cuda_graph())):
                self._is_fixed = True
                return False
        if any(given[i] - given[j] != self._given[i] - self._given[j] for i, j in self._together):
            return False
        try:
            self._set(given, changed)
        except DeviceError:  # memory of another kind: what is set already is wrong for every call
            self._is_fixed, self._given = True, ()
            return False
        return True

    def launch(self, stream: int) -> None:
        """Replay it on a stream: as PyTorch's replay, which also sees to random numbers, in less time."""
        (status,) = self._start(self._executable, stream)
        if status:
            raise driver.refused("cuGraphLaunch", status)

    def _learn(self, given: Given, changed: set[int], others: list[Node]) -> bool:
        """Find what differs from the launches of another call; False if that is more than places and scalars."""
        if [node.same for node in self._nodes] != [node.same for node in others]:
            return False
        two = Two(self._given, given, self._kinds)
        for number, (node, other) in enumerate(zip(self._nodes, others, strict=True)):
            found = two.sites(node.blocks, other.blocks)
            if found is None:
                return False
            self._sites.setdefault(number, set()).update(found)
        self._together, self._known = two.together(), self._known | changed | set(two.addresses)
        return True

    def _set(self, given: Given, changed: set[int]) -> None:
        for number, sites in self._sites.items():
            node, moving = self._nodes[number], [site for site in sites if site.position in changed]
            for site in moving:
                _write(node.blocks[site.block], site, given, self._kinds)
            if moving:
                node.set(self._executable)
        self._given = given


@dataclass(frozen=True)
class Two:
    """What two calls pass."""

    one: Given
    other: Given
    kinds: Sequence[Kind]

    @property
    def addresses(self) -> list[int]:
        """Positions of tensors that have memory."""
        return [i for i, kind in enumerate(self.kinds) if isinstance(kind, int) and kind]

    def together(self) -> list[tuple[int, int]]:
        """Pairs of tensors that overlap alike in both: what is one's could be the other's."""
        pairs = [(i, j) for i in self.addresses for j in self.addresses if i < j]
        return [(i, j) for i, j in pairs if self._overlap(i, j) and self._shift(i) == self._shift(j)]

    def _overlap(self, i: int, j: int) -> bool:
        a, b = self.one[i], self.one[j]
        return bool(a < b + self._nbytes(j) and b < a + self._nbytes(i))

    def _shift(self, position: int) -> int:
        return int(self.other[position] - self.one[position])

    def sites(self, mine: Sequence[memoryview], theirs: Sequence[memoryview]) -> list[Site] | None:
        """Where arguments are in the parameters of a node; None if these differ in something else."""
        found: list[Site] = []
        for number, (block, other) in enumerate(zip(mine, theirs, strict=True)):
            sites = self._scalar(number, block, other) or self._places(number, block, other)
            if sites is None:
                return None
            found += sites
        return found

    def _places(self, number: int, block: memoryview, other: memoryview) -> list[Site] | None:
        found, begin = [], 0
        for at in range(0, len(block) - len(block) % _WORD, _WORD):
            word, wanted = (int.from_bytes(part[at : at + _WORD], "little") for part in (block, other))
            position = self._owner(word, wanted)
            if position is not None:
                found.append(Site(number, at, position, word - self.one[position]))
            elif word != wanted:
                return None
            begin = at + _WORD
        return found if block[begin:] == other[begin:] else None

    def _owner(self, word: int, wanted: int) -> int | None:
        """The position of the tensor into which a word of the first call, and that of the other one, point alike."""
        for i in self.addresses:
            if 0 <= word - self.one[i] < self._nbytes(i) and wanted - word == self._shift(i):
                return i
        return None

    def _scalar(self, number: int, block: memoryview, other: memoryview) -> list[Site] | None:
        """The one scalar that a parameter is; None if it is not known to be one."""
        if block == other:
            return None
        scalars = [(i, kind) for i, kind in enumerate(self.kinds) if isinstance(kind, np.dtype)]
        pairs = [(i, _bytes(self.one[i], kind), _bytes(self.other[i], kind)) for i, kind in scalars]
        found = [i for i, mine, theirs in pairs if block == mine and other == theirs]
        return [Site(number, 0, found[0], None)] if len(found) == 1 else None

    def _nbytes(self, position: int) -> int:
        kind = self.kinds[position]
        assert isinstance(kind, int)
        return kind


def _write(block: memoryview, site: Site, given: Given, kinds: Sequence[Kind]) -> None:
    if site.offset is None:
        block[:] = _bytes(given[site.position], kinds[site.position])
    else:
        block[site.at : site.at + _WORD] = (given[site.position] + site.offset).to_bytes(_WORD, "little")


def _bytes(value: Any, dtype: Any) -> bytes:
    """A scalar as a kernel is passed it."""
    return np.asarray(value).astype(dtype).tobytes()


def captured(launches: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """The graph of launches, which do not run; not instantiated."""
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Other threads may allocate meanwhile, and this one may load kernels: that is no part of it.
    with _side_stream():
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            run(launches)
        finally:
            graph.capture_end()
    return graph


def _executable(graph: torch.cuda.CUDAGraph) -> Any:
    """An instantiated graph as the driver takes it."""
    from cuda.bindings import driver as names

    return names.CUgraphExec(graph.raw_cuda_graph_exec())


@contextmanager
def _side_stream() -> Iterator[None]:
    """The stream to capture on, as the current one: the caller's may be the default one, which cannot."""
    import torch

    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        yield


@cache
def _stream(device: int) -> torch.cuda.Stream:
    import torch

    return own_stream(torch.device("cuda", device))
