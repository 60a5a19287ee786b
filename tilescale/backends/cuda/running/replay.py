# SPDX-License-Identifier: MIT
"""Launches as a CUDA graph that accepts calls with moved tensors and other scalars.

Addresses of tensors are in the arguments of kernels and copies: as pointers, in structures, in descriptors of bulk
copies. Two captures, of calls with tensors at different addresses, show which bytes are addresses of arguments: the
graph accepts other addresses if it differs from the second capture in nothing else. From then on a call with moved
tensors costs the updates of some nodes of the graph, and nothing is bound, captured, or instantiated.

The driver updates no copies of several rows, and no fills. Tensors at these have stand-ins, at fixed addresses, in a
third capture.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tilescale.backends.cuda.running import driver, native
from tilescale.backends.cuda.running.graph_nodes import CapturedNode, nodes_of
from tilescale.backends.cuda.running.graphs import LaunchGraph, captured
from tilescale.backends.cuda.running.native import ReplayGraph
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.program.model import Program

_WORD = 8
"""Bytes of an address, and its alignment."""

Arguments = tuple[Any, ...]
"""The arguments of a call: the address of each tensor, the value of each scalar of kernels; None for others."""

Bind = Callable[[Collection[int]], list[StreamWork]]
"""Binds a call; returns its launches. The tensors at the given positions have stand-ins."""

ArgumentKind = int | np.dtype | None
"""Kind of an argument: the bytes of a tensor, or the type of a scalar."""


def kinds_of(program: Program, values: Sequence[Any], passed: Container[int]) -> list[ArgumentKind]:
    """Kinds of a call's arguments, where those at some positions are scalars of kernels."""
    found: list[ArgumentKind] = []
    for i, (parameter, value) in enumerate(zip(program.parameters, values, strict=True)):
        if parameter.buffer is not None:
            found.append(0 if value is None else value.nbytes)
        else:
            found.append(_type(str(parameter.var.dtype)) if i in passed else None)
    return found


def _type(name: str) -> ArgumentKind:
    try:
        return np.dtype(name)
    except TypeError:  # a type without a NumPy equivalent: it is not found in kernel arguments
        return None


class ArgumentSite(NamedTuple):
    """Bytes of a node that depend on an argument.

    Attributes:
        block: the parameter; `at` is the first byte in it.
        position: position of the argument.
        offset: the number added to the argument.
        nbytes: their number.
    """

    block: int
    at: int
    position: int
    offset: int
    nbytes: int


class GraphReplay:
    """The graph of a call's launches, instantiated.

    Attributes:
        graph: the graph and its sites, for the launch in C.
        given: the arguments at the capture, as 64-bit numbers.
    """

    def __init__(self, graph: LaunchGraph, given: Arguments, kinds: Sequence[ArgumentKind], pool: Any = None) -> None:
        """Instantiate a captured graph; nothing runs yet. `pool`: memory for further captures, as of the graph's."""
        self._pool, self._kinds, self.given = pool, kinds, _encoded(given, kinds)
        self._stand_ins: set[int] = set()  # positions of tensors that have one
        self._is_fixed = False
        self._instantiate(graph)
        self.graph = ReplayGraph(graph.executable, self.given, bytes(map(_code, kinds)), (graph, self._nodes))

    def _instantiate(self, graph: LaunchGraph) -> None:
        self._graph = graph
        self._nodes = nodes_of(graph.handle)
        self._sites: list[set[ArgumentSite]] = [set() for _ in self._nodes]
        self._known: set[int] = set()  # positions whose sites are known

    @property
    def handle(self) -> int:
        """The driver's handle of the captured graph."""
        return self._graph.handle

    def launch(self, given: Arguments, bind: Bind, stream: int) -> bool:
        """Replay it on a stream for a call; False, and nothing done, if it does not accept the call.

        PyTorch's replay also handles random numbers, and takes more time. `bind` is used for the first calls with moved
        tensors. Raises DeviceError: the launch fails.
        """
        passed = _encoded(given, self._kinds)
        if self._launched(passed, stream):
            return True
        return self._learn(passed, bind) and self._launched(passed, stream)

    def _launched(self, passed: Arguments, stream: int) -> bool:
        status = self.graph.launch(passed, stream)
        if status < 0:
            raise driver.refused("cuGraphLaunch", -status)
        return status != native.UNKNOWN

    def learn(self, given: Arguments, launches: list[StreamWork]) -> None:
        """Find the differences from the launches of an earlier call, unless a tensor needs a stand-in."""
        self._learn(_encoded(given, self._kinds), lambda _: launches, is_over=True)

    def _learn(self, passed: Arguments, bind: Bind, is_over: bool = False) -> bool:
        """Find the differences from the launches of another call, which may be over; False if there is nothing new, or
        more than addresses and scalars differ."""
        was = self.graph.given
        changed = {i for i, (now, before) in enumerate(zip(passed, was, strict=True)) if now != before}
        if changed <= self._known or self._is_fixed or self.graph.refused:
            return False
        again = captured(bind(self._stand_ins), self._pool)  # its nodes live as long as it does
        two = ArgumentPair(was, passed, self._kinds)
        found = two.differences(self._nodes, nodes_of(again.handle))
        if found is None:
            self._is_fixed = not is_over  # the first launches of a form may be others
            return False
        pairs = zip(self._nodes, found, strict=True)
        if held := {site.position for node, sites in pairs if node.is_constant for site in sites}:
            return not is_over and self._stand_in(held, two, bind)
        for sites, more in zip(self._sites, found, strict=True):
            sites.update(more)
        self._known |= changed | set(two.addresses)
        self.graph.learn(self.moving(self._nodes), self._known, two.together())
        return True

    def _stand_in(self, positions: set[int], two: ArgumentPair, bind: Bind) -> bool:
        """Replace the graph by that of the other call with stand-ins for tensors; False if they cannot have any."""
        if positions & (self._stand_ins | {i for pair in two.together() for i in pair}):
            self._is_fixed = True
            return False
        self._stand_ins |= positions
        self._instantiate(captured(bind(self._stand_ins), self._pool))
        self.given = two.other
        self.graph.replace(self._graph.executable, two.other, (self._graph, self._nodes))
        return True

    def moving(self, nodes: Sequence[CapturedNode], first: int = 0) -> list[native.ReplayNode]:
        """Those of its nodes, or of a copy's, that depend on arguments, whose positions begin at `first`."""
        return [
            native.ReplayNode(node.handle, node.parameters, node.context, [_at(node, site, first) for site in sites])
            for node, sites in zip(nodes, self._sites, strict=True)
            if sites
        ]


def _at(node: CapturedNode, site: ArgumentSite, first: int) -> native.ReplaySite:
    at = ctypes.addressof(node.blocks[site.block]) + site.at
    return native.ReplaySite(at, site.offset, first + site.position, site.nbytes)


@dataclass(frozen=True)
class ArgumentPair:
    """The arguments of two calls."""

    one: Arguments
    other: Arguments
    kinds: Sequence[ArgumentKind]

    @cached_property
    def addresses(self) -> list[int]:
        """Positions of tensors that have memory."""
        return [i for i, kind in enumerate(self.kinds) if isinstance(kind, int) and kind]

    @cached_property
    def _span(self) -> tuple[int, int]:
        """Addresses of the first call's tensors: all lie between these."""
        begins = [self.one[i] for i in self.addresses]
        return min(begins, default=0), max((self.one[i] + self._nbytes(i) for i in self.addresses), default=0)

    def together(self) -> list[tuple[int, int]]:
        """Pairs of tensors that overlap in the same way in both calls: an address of one could be the other's."""
        pairs = [(i, j) for i in self.addresses for j in self.addresses if i < j]
        return [(i, j) for i, j in pairs if self._overlap(i, j) and self._shift(i) == self._shift(j)]

    def _overlap(self, i: int, j: int) -> bool:
        a, b = self.one[i], self.one[j]
        return bool(a < b + self._nbytes(j) and b < a + self._nbytes(i))

    def _shift(self, position: int) -> int:
        return int(self.other[position] - self.one[position])

    def differences(
        self, nodes: Sequence[CapturedNode], others: Sequence[CapturedNode]
    ) -> list[list[ArgumentSite]] | None:
        """The arguments in each node's parameters; None if nodes differ in something else."""
        if [node.same for node in nodes] != [node.same for node in others]:
            return None
        found = [self._of_node(node, other) for node, other in zip(nodes, others, strict=True)]
        return None if None in found else found  # type: ignore[return-value]

    def _of_node(self, node: CapturedNode, other: CapturedNode) -> list[ArgumentSite] | None:
        found: list[ArgumentSite] = []
        for number, pair in enumerate(zip(node.blocks, other.blocks, strict=True)):
            mine, theirs = map(bytes, pair)
            sites = self._scalar(number, mine, theirs) or self._places(number, mine, theirs)
            if sites is None:
                return None
            found += sites
        return found

    def _places(self, number: int, block: bytes, other: bytes) -> list[ArgumentSite] | None:
        found, count = [], len(block) // _WORD
        first, end = self._span
        words, wanted = (struct.unpack_from(f"<{count}Q", each) for each in (block, other))
        for i, (word, moved) in enumerate(zip(words, wanted, strict=True)):
            if word == moved and not first <= word < end:
                continue
            position = self._owner(word, moved)
            if position is None and word != moved:
                return None
            if position is not None:
                found.append(ArgumentSite(number, i * _WORD, position, word - self.one[position], _WORD))
        rest = count * _WORD
        return found if block[rest:] == other[rest:] else None

    def _owner(self, word: int, wanted: int) -> int | None:
        """The position of the tensor to which a word of the first call, and that of the other one, point alike."""
        for i in self.addresses:
            if 0 <= word - self.one[i] < self._nbytes(i) and wanted - word == self._shift(i):
                return i
        return None

    def _scalar(self, number: int, block: bytes, other: bytes) -> list[ArgumentSite] | None:
        """The scalar in a parameter; None if it is not unique."""
        if block == other:
            return None
        scalars = [(i, kind.itemsize) for i, kind in enumerate(self.kinds) if isinstance(kind, np.dtype)]
        sized = [i for i, nbytes in scalars if nbytes == len(block)]
        found = [i for i in sized if [_low(x[i], len(block)) for x in (self.one, self.other)] == [block, other]]
        return [ArgumentSite(number, 0, found[0], 0, len(block))] if len(found) == 1 else None

    def _nbytes(self, position: int) -> int:
        kind = self.kinds[position]
        assert isinstance(kind, int)
        return kind


def _encoded(given: Arguments, kinds: Sequence[ArgumentKind]) -> Arguments:
    """The arguments as 64-bit numbers: addresses, and scalars as the bytes that a kernel is passed."""
    return tuple(0 if x is None else _number(x, kind) for x, kind in zip(given, kinds, strict=True))


def _number(value: Any, kind: ArgumentKind) -> int:
    if isinstance(kind, int):
        return int(value)
    made = np.asarray(value).astype(kind or np.dtype("float64"))
    return int.from_bytes(made.tobytes().ljust(_WORD, b"\0"), "little", signed=True)


def _low(number: int, nbytes: int) -> bytes:
    return number.to_bytes(_WORD, "little", signed=True)[:nbytes]


def _code(kind: ArgumentKind) -> int:
    """C's encoding of an argument (native/replays.c)."""
    if not isinstance(kind, np.dtype):
        return _ADDRESS if isinstance(kind, int) else _OTHER
    if kind.kind in "iu":
        return kind.itemsize
    return _FLOAT | kind.itemsize if kind.kind == "f" and kind.itemsize >= _NARROWEST else _OTHER


_ADDRESS, _FLOAT, _OTHER = 0, 0x40, 0xFF
_NARROWEST = 4
"""Bytes of the narrowest float that C converts to."""
