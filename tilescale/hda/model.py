# SPDX-License-Identifier: MIT
"""The machine model: levels of units, memory layers, networks between units, all frozen.

These dataclasses are also the schema of a machine description (see `schema.py`). Sizes are in bytes, bandwidths in
bytes/s, latencies in seconds, clocks in Hz, rates in operations/s (a fused multiply-add is two operations).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilescale.hda.schema import spec

__all__ = [
    "KINDS",
    "OPERATIONS",
    "SCOPES",
    "STARTERS",
    "TOPOLOGIES",
    "ComputeUnit",
    "Identify",
    "Level",
    "Library",
    "Link",
    "Mechanism",
    "MemoryLayer",
    "Network",
]

KINDS = ("thread_group", "program", "cluster", "unit")
SCOPES = ("fragment", "shared", "global", "host")
OPERATIONS = ("put", "get", "reduce")
STARTERS = ("program", "host")
Size = Any
"""A number, or an array of numbers."""

TOPOLOGIES = ("switch", "ring", "mesh", "torus", "point-to-point", "graph")


@dataclass(frozen=True, kw_only=True)
class ComputeUnit:
    """A kind of arithmetic that one unit of a level has, e.g. its matrix multiplier: a rate per data type."""

    name: str
    clock: float | None = spec("clock", "clock that its rates per clock count; else the program level's", default=None)
    rates: tuple[tuple[str, float], ...] = spec(
        "rates", "peak dense operations per second of one unit of the level, a multiply-add being two"
    )
    efficiency: float = spec("fraction", "share of the peak that well-tuned programs sustain", default=1.0)
    source: str = spec("text", "where the numbers come from", default="")


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of the machine. What may be said of it depends on `kind`:

    - "thread_group": a subdivision of a running tile program in hardware threads.
    - "program": the level whose units run tile programs; a machine has exactly one.
    - "cluster": programs that are launched together, resident at once and linked.
    - "unit": physical groups above the programs.
    """

    name: str
    kind: str = spec("choice", "what the level is", among=KINDS)
    title: str = spec("text", "what a person calls one unit", default="")
    threads: int | None = spec("integer", "thread_group: hardware threads in one unit", default=None)
    count: int | None = spec("integer", "program, unit: how many one unit of the next unit level has", default=None)
    virtual: bool = spec("boolean", "program: more programs than units are run in turn", default=True)
    max_programs: int = spec("integer", "program: programs resident on one unit at once", default=1)
    max_threads: int | None = spec("integer", "program: threads resident on one unit at once", default=None)
    max_threads_per_program: int | None = spec("integer", "program: threads of one program", default=None)
    max_size: int | None = spec("integer", "cluster: programs in one cluster at most", default=None)
    barrier: float = spec("time", "program: what a barrier of all its threads takes", default=0.0)
    launch: float = spec("time", "program, unit: what starting a grid on one unit takes", default=0.0)
    clock: float | None = spec("clock", "program: what quantities per clock count in this description", default=None)
    compute: tuple[ComputeUnit, ...] = spec(
        "named", "program, unit: kinds of arithmetic that one unit has", of=ComputeUnit, default=()
    )
    capabilities: tuple[str, ...] = spec("names", "what one unit can do, e.g. wgmma", default=())
    source: str = spec("text", "where the numbers come from", default="")

    @property
    def width(self) -> int:
        """Hardware threads in one unit of a thread group."""
        assert self.threads is not None, f"{self.name} is not a thread group"
        return self.threads


@dataclass(frozen=True, kw_only=True)
class MemoryLayer:
    """Memory that every unit of one level owns an instance of."""

    name: str
    level: str = spec("level", "the program or unit level whose every unit owns one instance")
    scopes: tuple[str, ...] = spec("choices", "kinds of buffer it holds; [] where programs place none", among=SCOPES)
    capacity: int = spec("size", "of one instance")
    shared: bool = spec("boolean", "true: all within the owning unit see all of it; false: each thread its own part")
    title: str = spec("text", "what a person calls it", default="")
    bandwidth: float | None = spec("bandwidth", "peak of one instance, reads and writes together", default=None)
    sustained: float | None = spec("bandwidth", "what well-tuned programs reach; else the peak", default=None)
    latency: float = spec("time", "from a load to its value", default=0.0)
    per_program: float | None = spec("bandwidth", "what one program reaches alone; else all", default=None)
    fill: float | None = spec("bandwidth", "zeros of one program's bulk loads, outside of a tensor", default=None)
    per_program_max: int | None = spec("size", "what one program may take; else all", default=None)
    per_thread_max: int | None = spec("size", "what one thread may take", default=None)
    reserved_per_program: int = spec("size", "taken from each resident program on top of what it asks", default=0)
    granularity: int = spec("size", "allocations are rounded up to this", default=1)
    granularity_per: str | None = spec(
        "level",
        "the level of kind thread_group whose every unit's part is rounded up; else a program's whole",
        default=None,
    )
    cache_capacity: int = spec("size", "cache in front of one instance", default=0)
    cache_bandwidth: float | None = spec("bandwidth", "of that cache", default=None)
    source: str = spec("text", "where the numbers come from", default="")

    @property
    def scope(self) -> str:
        """The first of `scopes`, "" if there are none."""
        return self.scopes[0] if self.scopes else ""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism that moves tiles over a network: hardware and instructions, with the rates of one sender.

    At least one of `put`, `get`, `reduce` is given; an operation without a bandwidth is not offered. They are bytes/s
    at large sizes, at most the network's bandwidth.
    """

    name: str
    put: float | None = spec("share", "writing to the far side", default=None)
    get: float | None = spec("share", "reading from the far side", default=None)
    reduce: float | None = spec("share", "adding to the far side's memory", default=None)
    startup: float = spec("time", "cost of one transfer before its first byte, on top of the latency", default=0.0)
    per_program: float | None = spec("bandwidth", "what one program reaches alone; else all", default=None)
    started_by: str = spec("choice", "the initiator of a transfer", among=STARTERS, default="program")
    scopes: tuple[str, ...] = spec(
        "choices", "kinds of buffer that the near side may be; [] for all", among=SCOPES, default=()
    )
    alignment: int = spec("size", "what the rows of a tile must be multiples of", default=1)
    on_request: bool = spec("boolean", "whether it is taken only where a program asks for it", default=False)
    source: str = spec("text", "where the numbers come from", default="")

    @property
    def bandwidth(self) -> float:
        """The best of its operations, bytes/s."""
        return max(rate for rate in map(self.rate, OPERATIONS) if rate is not None)

    def map(self, change: Callable[[str, float], float | None]) -> Mechanism:
        """The mechanism with other bandwidths: `change(operation, rate)` for each that it offers."""
        rates = {op: (op, rate) for op in OPERATIONS if (rate := self.rate(op)) is not None}
        put, get, reduce = (change(*rates[op]) if op in rates else None for op in OPERATIONS)
        return replace(self, put=put, get=get, reduce=reduce)

    def rate(self, operation: str) -> float | None:
        """Bandwidth of "put", "get" or "reduce" in bytes/s; None where it is not offered."""
        rate: float | None = getattr(self, operation)
        return rate

    def seconds(
        self, nbytes: Size, operation: str = "put", *, bandwidth: float = math.inf, starts: float | Size = 1
    ) -> Size:
        """Seconds from the start of a transfer until its last byte has left: the one formula for all of them.

        Start-up and bytes over the rate, as in the postal model (Bar-Noy and Kipnis, 1994). The network adds the
        latency of the path. The mechanism must offer the operation.

        Args:
            nbytes: a number, or an array of them.
            bandwidth: bandwidth available to this transfer, bytes/s, if less than the mechanism's rate.
            starts: number of start-ups to add: none if other transfers hide them, several if they queue.
        """
        return starts * self.startup + nbytes / min(self.rate(operation) or 0.0, bandwidth)

    @property
    def fork_and_join(self) -> float:
        """Exposed seconds of a call with such a queue: fork of its stream and join take a start-up each.

        On two H200 a gather of 12 KiB for a GEMM of 6 us takes 32 us.
        """
        return 2 * self.startup


@dataclass(frozen=True, kw_only=True)
class Library:
    """Software that makes collectives of whole tensors over a network, by its mechanisms."""

    name: str
    setup: float = spec("time", "cost of one collective before its first message")
    source: str = spec("text", "where the numbers come from", default="")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of a network of topology "graph"; both directions at once."""

    between: tuple[int, int] = spec("pair", "the two units, numbered within the network")
    bandwidth: float | None = spec("bandwidth", "per direction; else the network's `link_bandwidth`", default=None)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between the units of one level, within one unit of a coarser level or in the whole machine.

    `bandwidth` is the rate at which one unit sends, and at the same time receives, over all its links. `link_bandwidth`
    is that of one link in one direction, and so the limit for one pair of neighbours. Latency is end to end through a
    switch, and of each hop elsewhere.
    """

    name: str
    level: str = spec("level", "whose units it connects")
    within: str | None = spec("level", "whose one unit holds one such network; else the whole machine", default=None)
    topology: str = spec("choice", "how the units are linked", among=TOPOLOGIES)
    bandwidth: float = spec("bandwidth", "of one unit, per direction, over all its links")
    link_bandwidth: float = spec("bandwidth", "of one link, per direction; else the unit's split evenly", default=0.0)
    latency: float = spec("time", "end to end through a switch, else of each hop, for the smallest transfer")
    mechanisms: tuple[Mechanism, ...] = spec("named", "ways to move tiles over it, best first", of=Mechanism)
    reaches: str = spec("layer", "the memory of the far side that transfers read and write")
    ports: str | None = spec(
        "level", "a finer level whose every unit has a port of its own, sharing out the bandwidth", default=None
    )
    libraries: tuple[Library, ...] = spec(
        "named", "software for collectives, by the name that `impl=` asks for", of=Library, default=()
    )
    dims: tuple[int, ...] = spec("integers", "mesh, torus: units along each dimension, slowest first", default=())
    links: tuple[Link, ...] = spec("list", "graph: the links", of=Link, default=())
    title: str = spec("text", "what a person calls it", default="")
    capabilities: tuple[str, ...] = spec(
        "names",
        "what it can do, e.g. multicast; whole-lines: what a warp stores into 128 bytes at once arrives as a whole",
        default=(),
    )
    source: str = spec("text", "where the numbers come from", default="")

    def mechanism(self, name: str) -> Mechanism | None:
        """The mechanism of that name, or None."""
        return next((m for m in self.mechanisms if m.name == name), None)

    def setup(self, impl: str) -> float:
        """Seconds that a collective of an implementation takes before its first message."""
        return next((library.setup for library in self.libraries if library.name == impl), 0.0)


@dataclass(frozen=True, kw_only=True)
class Identify:
    """Facts by which `Machine.detect` recognizes the hardware of a description."""

    products: tuple[str, ...] = spec("names", "product names as the driver reports them, or parts of them", default=())
    architecture: str = spec("text", "compute capability, or architecture of AMD GPUs, such as gfx942", default="")
    cores: int | None = spec("integer", "cores of one program unit, as the driver counts cores", default=None)
    network: str = spec("text", "the network whose links the driver counts", default="")
    links: int | None = spec("integer", "links of one unit when all are up", default=None)
