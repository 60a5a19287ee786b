# SPDX-License-Identifier: MIT
"""The forms of a program's calls, and what launches a call of one, in C (native/replays.c)."""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from tilelang_core.native import FOLDER, Library, compiler, library
from tilescale.backends.cuda.native import source
from tilescale.backends.cuda.running.toolchain import check_cache
from tilescale.errors import DeviceError

UNKNOWN = 0
"""A call that was not launched: its form, or what moves in it, is not known. 1 is launched, below zero a status."""

PLACES = 64
"""Arguments that a call has at most, to be one of a form."""


class Site(NamedTuple):
    """Bytes that an argument decides: where they are, what is added to the argument, and how many."""

    at: int
    offset: int
    position: int
    nbytes: int


class Node(NamedTuple):
    """A node of a graph as the driver sets it: handle, its parameters, the context of a copy (0 for a kernel)."""

    handle: int
    parameters: int
    context: int
    sites: Sequence[Site]


class _Site(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("position", ctypes.c_int32),
        ("nbytes", ctypes.c_int32),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("node", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("sites", ctypes.POINTER(_Site)),
        ("count", ctypes.c_int64),
    )


class _Replay(ctypes.Structure):
    _fields_ = (
        ("executable", ctypes.c_void_p),
        ("nodes", ctypes.POINTER(_Node)),
        ("node_count", ctypes.c_int64),
        ("given", ctypes.POINTER(ctypes.c_int64)),
        ("kinds", ctypes.c_char_p),
        ("known", ctypes.c_char_p),
        ("given_count", ctypes.c_int64),
        ("pairs", ctypes.POINTER(ctypes.c_int32)),
        ("pair_count", ctypes.c_int64),
        ("refused", ctypes.c_int64),
    )


class _Source(ctypes.Structure):
    _fields_ = (("tensor", ctypes.c_int64), ("offset", ctypes.c_int64))


class _Step(ctypes.Structure):
    _fields_ = (
        ("replay", ctypes.c_void_p),
        ("sources", ctypes.POINTER(_Source)),
        ("count", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
    )


class _Record(ctypes.Structure):
    _fields_ = (("steps", ctypes.POINTER(_Step)), ("count", ctypes.c_int64))


class Graph:
    """An instantiated graph, with what its nodes are passed."""

    def __init__(self, executable: int, given: Sequence[int], kinds: bytes):
        """`given` is what it was captured with; `kinds` how C finds the number of each argument."""
        connect()
        self._given = (ctypes.c_int64 * len(given))(*given)
        self._record = _Replay(executable=executable, given=self._given, kinds=kinds, given_count=len(given))
        self._launch, self.address = _replays().plain.launch, ctypes.addressof(self._record)
        self.learn((), (), ())

    def learn(self, nodes: Sequence[Node], known: Iterable[int], pairs: Sequence[tuple[int, int]]) -> None:
        """From now on it serves calls that differ in what arguments at the `known` positions decide.

        Args:
            nodes: with all bytes that these decide.
            pairs: arguments that have to stay as far apart as they are.
        """
        flags = bytearray(len(self._given))
        for position in known:
            flags[position] = 1
        sites = [(_Site * len(node.sites))(*(_Site(*site) for site in node.sites)) for node in nodes]
        each = [_Node(*node[:3], at, len(at)) for node, at in zip(nodes, sites, strict=True)]
        record, self._kept, self._known = self._record, sites, bytes(flags)
        record.nodes, record.node_count = (_Node * len(each))(*each), len(each)
        record.known = self._known
        record.pairs = (ctypes.c_int32 * (2 * len(pairs)))(*(position for pair in pairs for position in pair))
        record.pair_count = len(pairs)

    @property
    def given(self) -> tuple[int, ...]:
        """What the nodes are passed now."""
        return tuple(self._given)

    def knows(self, position: int) -> bool:
        """Whether it serves calls that differ in this argument."""
        return bool(self._known[position])

    @property
    def refused(self) -> bool:
        """Whether it serves nobody any more, as the driver has refused to set a node, or it is forgotten."""
        return bool(self._record.refused)

    def forget(self) -> None:
        """Let it serve nobody any more."""
        self._record.refused = 1

    def launch(self, given: Sequence[int], stream: int) -> int:
        """Launch it for a call: UNKNOWN, 1, or minus the driver's status."""
        return int(self._launch(self.address, (ctypes.c_int64 * len(given))(*given), stream))


class Forms:
    """Forms of calls, and a number that is kept for each: the address of a graph, or whatever is not 0.

    Attributes:
        table: what `call(table, stream, *values)` takes, which launches the graph that is kept for the form of these
            values, and `find(table, *values)`, which gives the number, 0 if there is none.
    """

    def __init__(self, symmetric: Sequence[tuple[int, int]]):
        """`symmetric` are addresses from which on, and up to which, places are a part of a form."""
        loaded = _replays()
        self._symmetric = (ctypes.c_int64 * (2 * len(symmetric)))(*(at for each in symmetric for at in each))
        self._plain, self.table = loaded.plain, int(loaded.plain.table_new(self._symmetric, len(symmetric)))
        self._keep, self.call, self.find = (loaded.functions[name] for name in ("keep", "call", "find"))
        self._masks = 0, 0
        weakref.finalize(self, loaded.plain.table_free, self.table)

    def keep(self, kept: int, values: Sequence[Any], passed: Iterable[int] = (), fixed: Iterable[int] = ()) -> None:
        """Keep a number for the form of these values; if positions are others than before, for that form alone.

        Args:
            passed: positions of scalars by which forms are not told apart.
            fixed: positions of tensors whose places are a part of the form.
        """
        masks = _mask(passed), _mask(fixed)
        if masks != self._masks:
            self._masks = masks
            self.clear()
        if len(values) <= PLACES:
            self._keep(self.table, kept, *values)

    def drop(self, kept: int) -> None:
        """Forget the forms for which a number is kept."""
        self._plain.table_drop(self.table, kept)

    def clear(self) -> None:
        """Forget all of them."""
        self._plain.table_clear(self.table, *self._masks)


class Source(NamedTuple):
    """What a graph is passed: the address of a tensor, by its number, and an offset; of no tensor (-1) that alone."""

    tensor: int
    offset: int


class Step(NamedTuple):
    """A graph with what it is passed; or None, for a copy of so many bytes from the second source to the first one."""

    graph: Graph | None
    sources: Sequence[Source]
    nbytes: int = 0


class Record:
    """Steps that are made one after the other, or none of them.

    Attributes:
        address: what `run(address, stream, *tensors)` takes, which gives UNKNOWN, 1, or minus the driver's status; and
            `can_run(address, *tensors)`, which says whether it can be run once tensors are there of which these are the
            first ones.
    """

    def __init__(self, steps: Sequence[Step]):
        sources = [(_Source * len(step.sources))(*(_Source(*each) for each in step.sources)) for step in steps]
        each = [
            _Step(step.graph.address if step.graph else None, at, len(at), step.nbytes)
            for step, at in zip(steps, sources, strict=True)
        ]
        self._kept, self._record = (sources, steps), _Record((_Step * len(each))(*each), len(each))
        functions, self.address = _replays().functions, ctypes.addressof(self._record)
        self.run, self.can_run = functions["run"], functions["can_run"]


def _mask(positions: Iterable[int]) -> int:
    return sum(1 << position for position in positions if position < PLACES)


@cache
def connect() -> None:
    """Let C know where the driver's functions are. Raises DeviceError, as `_replays`."""
    loaded = ctypes.CDLL("libcuda.so.1")
    names = (
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphLaunch",
        "cuMemcpyAsync",
    )
    _replays().plain.driver(*(ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names))


@cache
def _replays() -> Library:
    """Raises UntrustedCacheError, and DeviceError without a C compiler, if nobody has compiled it before."""
    check_cache(FOLDER)
    try:
        loaded = library(source("replays.c"))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        raise DeviceError(
            f"the host's part of calls does not compile with {compiler() or 'cc'}: {said.decode()[-800:]}",
            hint="install a C compiler, as nvcc needs one, too",
        ) from error
    number, address = ctypes.c_int64, ctypes.c_void_p
    for name, result, *given in (
        ("driver", None, address, address, address, address),
        ("launch", number, address, address, address),
        ("table_new", address, address, number),
        ("table_clear", None, address, ctypes.c_uint64, ctypes.c_uint64),
        ("table_drop", None, address, address),
        ("table_free", None, address),
    ):
        function = getattr(loaded.plain, name)
        function.restype, function.argtypes = result, given
    return loaded
