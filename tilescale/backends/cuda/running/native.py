# SPDX-License-Identifier: MIT
"""Forms of a program's calls, and their launch in C (native/replays.c). call_table.py has those of operators."""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from tilelang_core.native import FOLDER, NativeLibrary, compiler, library
from tilescale.backends.cuda.native import source
from tilescale.backends.cuda.running.toolchain import check_cache
from tilescale.errors import DeviceError

UNKNOWN, LAUNCHED = 0, 1
"""Status of a call: not launched, as its form, or a moved argument, is unknown; or launched. Below zero is a driver's
status."""

PLACES = 64
"""Maximum number of arguments of a call with a form."""


class ReplaySite(NamedTuple):
    """Bytes that depend on an argument: their position, the offset added to the argument, and their number."""

    at: int
    offset: int
    position: int
    nbytes: int


class ReplayNode(NamedTuple):
    """A node of a graph for the driver's update: handle, its parameters, the context of a copy (0 for a kernel)."""

    handle: int
    parameters: int
    context: int
    sites: Sequence[ReplaySite]


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


class ReplayGraph:
    """An instantiated graph, with its nodes' arguments.

    Attributes:
        kinds: the encoding of each argument.
        known: for each argument, whether it accepts calls that differ in it: 1 or 0.
        pairs: arguments whose distance must not change.
    """

    def __init__(self, executable: int, given: Sequence[int], kinds: bytes, owner: Any):
        """`given` are the arguments at the capture, `owner` keeps the executable graph, and the nodes to update."""
        connect()
        self.kinds, self._record = kinds, _Replay(kinds=kinds, given_count=len(given))
        self._wholes: weakref.WeakSet[ReplayGraph] = weakref.WeakSet()
        self._launch, self.address = loaded_code().plain.launch, ctypes.addressof(self._record)
        self.replace(executable, given, owner)

    def replace(self, executable: int, given: Sequence[int], owner: Any) -> None:
        """Be another graph of as many arguments. Graphs that this one is a part of are forgotten."""
        self._given, self._owner = (ctypes.c_int64 * len(given))(*given), owner
        self._record.executable, self._record.given = executable, self._given
        self.learn((), (), ())
        self._forget_wholes()

    def learn(self, nodes: Sequence[ReplayNode], known: Iterable[int], pairs: Sequence[tuple[int, int]]) -> None:
        """Accept calls from now on that differ in the arguments at the `known` positions, but keep the distance of
        `pairs` of arguments. `nodes` have all bytes that depend on these."""
        flags = bytearray(len(self._given))
        for position in known:
            flags[position] = 1
        sites = [(_Site * len(node.sites))(*(_Site(*site) for site in node.sites)) for node in nodes]
        each = [_Node(*node[:3], at, len(at)) for node, at in zip(nodes, sites, strict=True)]
        record, self._kept, self.known, self.pairs = self._record, sites, bytes(flags), pairs
        record.nodes, record.node_count = (_Node * len(each))(*each), len(each)
        record.known = self.known
        record.pairs = (ctypes.c_int32 * (2 * len(pairs)))(*(position for pair in pairs for position in pair))
        record.pair_count = len(pairs)

    @property
    def given(self) -> tuple[int, ...]:
        """The present arguments of the nodes."""
        return tuple(self._given)

    @property
    def refused(self) -> bool:
        """Whether it accepts no more calls: the driver has rejected an update of a node, or it is forgotten."""
        return bool(self._record.refused)

    def is_part_of(self, whole: ReplayGraph) -> None:
        """Forget that graph together with this one."""
        self._wholes.add(whole)

    def forget(self) -> None:
        """Accept no more calls."""
        self._record.refused = 1
        self._forget_wholes()

    def _forget_wholes(self) -> None:
        for whole in self._wholes:
            whole.forget()

    def launch(self, given: Sequence[int], stream: int) -> int:
        """Launch it for a call: UNKNOWN, 1, or minus the driver's status."""
        return int(self._launch(self.address, (ctypes.c_int64 * len(given))(*given), stream))


class CallForms:
    """Forms of calls with the address of a graph for each. `table`: the first argument of `call(table, stream,
    *values)`, which launches the graph of the form of these values, and of `find(table, *values)`, which returns its
    address, 0 if there is none."""

    def __init__(self, symmetric: Sequence[tuple[int, int]]):
        """`symmetric` are begin and end of addresses that are a part of a form."""
        loaded = loaded_code()
        self._symmetric = ranges(symmetric)
        self._plain, self.table = loaded.plain, int(loaded.plain.table_new(self._symmetric, len(symmetric)))
        self._keep, self.call, self.find = (loaded.functions[name] for name in ("keep", "call", "find"))
        self._masks = 0, 0
        weakref.finalize(self, loaded.plain.table_free, self.table).atexit = False  # others' functions may call, too

    def keep(self, kept: int, values: Sequence[Any], passed: Iterable[int] = (), fixed: Iterable[int] = ()) -> None:
        """Keep an address for the form of these values; if positions differ from before, only for that form.

        Args:
            passed: positions of scalars that are not a part of the form.
            fixed: positions of tensors whose addresses are a part of the form.
        """
        masks = _mask(passed), _mask(fixed)
        if masks != self._masks:
            self._masks = masks
            self.clear()
        if len(values) <= PLACES:
            self._keep(self.table, kept, *values)

    def drop(self, kept: int) -> None:
        """Forget the forms with an address."""
        self._plain.table_drop(self.table, kept)

    def clear(self) -> None:
        self._plain.table_clear(self.table, *self._masks)


class ReplaySource(NamedTuple):
    """An argument of a graph: the address of a tensor, by its number, plus an offset; without a tensor (-1) only the
    offset."""

    tensor: int
    offset: int


class ReplayStep(NamedTuple):
    """A graph with its arguments; or None, for a copy of `nbytes` bytes from the second source to the first one."""

    graph: ReplayGraph | None
    sources: Sequence[ReplaySource]
    nbytes: int = 0


class ReplayRecord:
    """Steps that are executed in order, all or none. `address`: that of the record in C."""

    def __init__(self, steps: Sequence[ReplayStep]):
        sources = [(_Source * len(step.sources))(*(_Source(*each) for each in step.sources)) for step in steps]
        each = [
            _Step(step.graph.address if step.graph else None, at, len(at), step.nbytes)
            for step, at in zip(steps, sources, strict=True)
        ]
        self._kept, self._record = (sources, steps), _Record((_Step * len(each))(*each), len(each))
        self.address = ctypes.addressof(self._record)


def ranges(symmetric: Sequence[tuple[int, int]]) -> ctypes.Array[ctypes.c_int64]:
    """Begins and ends of memory as C takes them."""
    return (ctypes.c_int64 * (2 * len(symmetric)))(*(at for each in symmetric for at in each))


def _mask(positions: Iterable[int]) -> int:
    return sum(1 << position for position in positions if position < PLACES)


@cache
def connect() -> None:
    """Pass the driver's function pointers to C. Raises DeviceError, as `loaded_code`."""
    loaded = ctypes.CDLL("libcuda.so.1")
    names = (
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphLaunch",
        "cuMemcpyAsync",
    )
    loaded_code().plain.driver(*(ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names))


@cache
def loaded_code() -> NativeLibrary:
    """The compiled C code, of all files. Raises UntrustedCacheError; DeviceError if a compiler is missing or fails."""
    check_cache(FOLDER)
    try:
        loaded = library(source("replays.c") + source("python_abi.h") + source("calls.c"))
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
