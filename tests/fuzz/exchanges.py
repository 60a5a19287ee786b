# SPDX-License-Identifier: MIT
"""Buffers that statements of a random program choose from, and what its blocks and devices send each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.buffers import EXACT, SLOTS, Buffer, Expressions, Scope
from tests.fuzz.program import Line, Parameter


def anything(_: Buffer) -> bool:
    return True


class Exchanges(Expressions):
    """Buffers of a launch, and transfers between units that do not share shared memory."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.parameters: list[Parameter] = []
        self.buffers: list[Buffer] = []
        self.kept: list[Buffer] = []
        self.at_head: list[Line] = []
        self.at_begin: list[Line] = []
        self.devices = self.blocks = self.threads = self.rows = self.columns = 1
        self.cluster = 0
        self.dtypes: list[str] = []
        self.made = 0

    # -- buffers -----------------------------------------------------------------------------------------------------

    def input(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """A tensor of tiles, now and then one whose last rows are missing."""
        name = f"X{len(self.parameters)}"
        found = [b for b in self.buffers if b.kind == "input" and b.shape == shape and b.dtype == dtype]
        if found and self.rng.random() < 0.8:
            return self.rng.choice(found)
        self.parameters.append(Parameter(name, (self.blocks, SLOTS, *shape), dtype, is_input=True))
        slot = self.rng.randrange(SLOTS)
        self.buffers.append(Buffer(name, shape, dtype, "input", f"b, {slot}, ", defined=True))
        return self.buffers[-1]

    def chosen(self) -> Buffer:
        """A number for each block."""
        if not any(p.name == "Chosen" for p in self.parameters):
            self.parameters.append(Parameter("Chosen", (self.blocks,), "int32", is_input=True))
        return Buffer("Chosen", (self.blocks,), "int32", "input")

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """An output, a tile for each block; some outputs lack the last rows and columns."""
        name = f"Y{len(self.parameters)}"
        tail = self.rng.random() < 0.2 and min(shape) > 4
        held = tuple(n - self.rng.randint(0, 3) for n in shape) if tail else shape
        self.parameters.append(Parameter(name, (self.blocks, *held), dtype))
        made = Buffer(name, shape, dtype, "global", "b, ")
        if not tail:
            self.buffers.append(made)
        return made

    def tile(self, shape: tuple[int, ...], dtype: str, kind: str, *, inner: bool = False) -> Buffer:
        """Make a new tile of the launch, or of a group, whose tile is initialized at the start."""
        level = {"device": "l2", "shared": "l1", "fragment": "l0"}[kind]
        self.made += 1
        name = f"{kind[0]}{self.made}"
        whole = (self.blocks, *shape) if kind == "device" else shape
        where = self.at_head if kind == "device" else self.at_begin
        where.append(Line(f'{name} = T.alloc({whole}, "{dtype}", level="{level}")'))
        self.buffers.append(Buffer(name, shape, dtype, kind, "b, " if kind == "device" else "", inner=inner))
        return self.buffers[-1]

    def new(self, shape: tuple[int, ...] | None, dtype: str | None, kinds: tuple[str, ...]) -> Buffer:
        """A new tile or output."""
        kind, dtype = self.rng.choice(kinds), dtype or self.rng.choice(self.dtypes)
        if shape is None:
            square = (self.rows, self.columns)
            shape = self.rng.choice((square, square, square[::-1], (self.rows,), (self.columns,)))
        return self.tensor(shape, dtype) if kind == "global" else self.tile(shape, dtype, kind)

    def target(
        self, scope: Scope, kinds: tuple[str, ...] = ("global", "device", "shared", "shared", "fragment"),
        shape: tuple[int, ...] | None = None, allowed: Callable[[Buffer], bool] = anything, dtype: str | None = None,
    ) -> Buffer | None:  # fmt: skip
        """Choose a target of a statement; a new one now and then."""
        found = [b for b in self.buffers if b.kind in kinds and shape in (None, b.shape) and allowed(b)]
        found = [b for b in found if self.may_write(scope, b) and (b.defined or not scope.branched)]
        if scope.branched or scope.group is not None or (found and self.rng.random() < 0.6):
            return self.rng.choice(found) if found else None
        made = self.new(shape, dtype, kinds)
        return made if allowed(made) and made in self.buffers else None

    def defined(self, scope: Scope, allowed: Callable[[Buffer], bool] = anything) -> Buffer | None:
        """Choose an operand of a statement."""
        found = [b for b in self.buffers if b.defined and allowed(b)]
        if scope.group is None:
            found = [b for b in found if not b.inner]
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found) if found else None

    def may_write(self, scope: Scope, buffer: Buffer) -> bool:
        """Whether a unit may write its rows of a buffer."""
        group = scope.group
        if group is None:
            return not buffer.inner
        if buffer.inner:
            return True
        rows = buffer.shape[0]
        return (
            buffer.defined and buffer.kind != "fragment" and rows % group.units == 0
            and buffer.name not in group.crossed and len(buffer.shape) == 2
        )  # fmt: skip

    def may_read(self, scope: Scope, buffer: Buffer) -> bool:
        """Whether a unit may read a buffer."""
        if scope.group is None or buffer.inner:
            return True
        return buffer.kind != "fragment"

    def note(self, scope: Scope, buffer: Buffer, bound: int) -> None:
        """A statement writes values of a bound: to all of a buffer, of which a unit of a group has its rows."""
        part = scope.branched or (scope.group is not None and not buffer.inner)
        buffer.bound, buffer.defined = max(bound, buffer.bound) if part else bound, True
        if scope.group is not None and not buffer.inner:
            scope.group.written.add(buffer.name)

    def source(self, buffer: Buffer, other: Buffer | None = None) -> str:
        """A whole buffer as a copy names it: its begin if the other side has the extent, else all of it."""
        if buffer.is_tile or (other is not None and other.is_tile):
            return buffer.whole
        return self.full(buffer)

    def full(self, buffer: Buffer) -> str:
        """All elements, by their ranges."""
        return buffer.region([(0, n) for n in buffer.shape])

    def outer(self, buffer: Buffer, scope: Scope) -> Buffer:
        """The buffer, or another tile of the same tensor where one may be read."""
        if buffer.kind == "input" and self.rng.random() < 0.5:
            names = [name for name, _ in scope.loops] or ["0"]
            slot = self.moved(self.rng.choice(names), SLOTS)
            return replace(buffer, prefix=f"{self.moved('b', self.blocks)}, {slot}, ")
        return buffer

    def moved(self, number: str, extent: int) -> str:
        """A number in a range, which grows or falls with another one."""
        shift = self.rng.randrange(extent)
        forms = f"{number} + {shift}", f"{shift} - {number}", f"{shift} - {number} // 2", f"{extent} - {number} // 3"
        return f"({self.rng.choice(forms)}) % {extent}"

    # -- transfers ---------------------------------------------------------------------------------------------------

    def exchange(self, scope: Scope) -> list[Line] | None:
        """An exchange between the blocks of a cluster, or between devices."""
        if scope.branched or scope.group is not None:
            return None
        if self.cluster:
            ways = (self.put_in_cluster, self.put_in_cluster, self.get_in_cluster, self.sum_tiles)
        else:
            ways = (self.put, self.put, self.get, self.sum_tiles)
        return self.rng.choice(ways)(scope)

    def sent(self, scope: Scope, kinds: tuple[str, ...]) -> Buffer | None:
        """A tile that goes to another unit."""
        return self.defined(scope, lambda b: b.kind in kinds and len(b.shape) == 2)

    def put_in_cluster(self, scope: Scope) -> list[Line] | None:
        """Into a neighbour's shared memory, between barriers."""
        source = self.sent(scope, ("shared", "fragment"))
        if source is None:
            return None
        inbox = self.tile(source.shape, source.dtype, "shared")
        inbox.defined, inbox.bound = True, source.bound
        peer = f"(rank + {self.rng.randrange(1, self.cluster)}) % size"
        put = Line(f"T.copy({source.name}, {inbox.name}, dst={peer})")
        first = [Line("T.barrier()")] if scope.loops else []
        return [*first, put, Line("T.barrier()")]

    def get_in_cluster(self, scope: Scope) -> list[Line] | None:
        """From a neighbour's shared memory, between barriers."""
        source = self.sent(scope, ("shared",))
        if source is None:
            return None
        target = self.tile(source.shape, source.dtype, self.rng.choice(("shared", "fragment")))
        target.defined, target.bound = True, source.bound
        peer = f"(rank + {self.rng.randrange(1, self.cluster)}) % size"
        return [Line("T.barrier()"), Line(f"T.copy({source.name}, {target.name}, src={peer})"), Line("T.barrier()")]

    def sum_tiles(self, scope: Scope) -> list[Line] | None:
        """A tile's sum over the cluster, or over the devices."""
        units = self.cluster or self.devices
        tile = self.sent(scope, ("shared", "fragment"))
        if tile is None or tile.dtype not in ("int32", "float32") or scope.loops or tile.bound * units > EXACT:
            return None
        tile.bound *= units
        return [Line(f"T.allreduce({tile.name})")]

    def put(self, scope: Scope) -> list[Line] | None:
        """Into the other device's memory with a signal, and a wait for what comes from there."""
        source = self.sent(scope, ("shared", "fragment", "device"))
        if source is None or scope.loops:
            return None
        inbox = self.tile(source.shape, source.dtype, "device")
        flags = f"arrived_{inbox.name}"
        self.at_head.append(Line(f"{flags} = T.alloc_flags(({self.blocks},))"))
        inbox.defined, inbox.bound = True, source.bound
        put = f"T.copy({self.source(source, inbox)}, {self.source(inbox, source)}, dst=(rank + 1) % size"
        wait = Line(f'T.wait({flags}[b], ">=", 1)')
        if self.rng.random() < 0.5:
            return [Line(f"{put}, signal={flags}[b])"), wait]
        return [Line(f"{put})"), Line(f"T.signal({flags}[b], dst=(rank + 1) % size)"), wait]

    def get(self, scope: Scope) -> list[Line] | None:
        """From the other device's memory, between barriers."""
        source = self.sent(scope, ("device",))
        if source is None:
            return None
        target = self.tile(source.shape, source.dtype, self.rng.choice(("shared", "fragment")))
        target.defined, target.bound = True, source.bound
        copy = Line(f"T.copy({source.whole}, {target.name}, src=(rank + 1) % size)")
        return [Line("T.barrier()"), copy, Line("T.barrier()")]
