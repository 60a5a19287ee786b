# SPDX-License-Identifier: MIT
"""The roles of a grid phase's threads, and the channels between them.

A channel is a ring of tiles: its producer fills a stage once all consumers have released it, and they take it once it
is full. Each stage has a full and an empty mbarrier, emitted by this back end (mbarriers.py), stock TileLang's producer
for one pipelined loop, or its schedule of warps that keep their roles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilelang_core import ir, role_schedule, specialise
from tilescale.backends.tilelang.ptx import WARPGROUP, registers_of
from tilescale.hda import Machine

COMPUTE, LOAD, COMMUNICATE, STORE = "compute", "load", "communicate", "store"
"""Names of roles."""

PEERS, LATER = "peers", "next iteration"
"""Pseudo-consumers of channels: tiles are copied to other devices, or their stores complete an iteration later."""

LOADING, POLLING, COMMUNICATING = 24, 40, 96
"""Registers of a thread that loads, of one that waits as well (of 24 it would spill some), and of one that combines
tiles with those of other devices."""

Role = role_schedule.Role


@dataclass(frozen=True)
class Channel(role_schedule.RoleTransfer):
    """Tiles that one role fills in each iteration of a loop, and another one takes.

    Attributes:
        producer, consumer: names of the roles.
        gates: the calls of `T.wait` that the producer makes before its loads.
        signals: signals deferred until the tiles have been stored.
        parts: number of parts of a stage, each handed over as soon as it is full or used.
        shared: tiles among them that are multicast to all blocks of a cluster.
        is_released: whether consumers signal the producer on arrival at the loop.
        near, far: tensors, of this device and of peers, that are loaded ahead of the consumers' waits.
        is_free: whether these are loaded ahead of the producer's own waits, too.
    """

    producer: str = LOAD
    consumer: str = COMPUTE
    gates: int = 0
    signals: int = 0
    parts: int = 1
    shared: frozenset[ir.Var] = frozenset()
    is_released: bool = False
    near: frozenset[ir.Var] = frozenset()
    far: frozenset[ir.Var] = frozenset()
    is_free: bool = False

    def __str__(self) -> str:
        names = [f"{tile.name} (multicast)" if tile.data in self.shared else str(tile.name) for tile in self.tiles]
        said = [
            f"{self.depth} stage{'s' * (self.depth > 1)}",
            *([f"in {self.parts} parts"] if self.parts > 1 else []),
            *([f"{self.gates} T.wait by {self.producer}"] if self.gates else []),
            *([f"{self.signals} kept signal{'s' * (self.signals > 1)}"] if self.signals else []),
            *([f"once {self.consumer} comes to the loop"] if self.is_released else []),
        ]
        return f"{self.producer} -> {self.consumer}: {', '.join(names) or 'no tile'}; {', '.join(said)}"


@dataclass(frozen=True)
class RoleGraph:
    """The roles of a grid phase, in the order of their threads, and the channels between them.

    Attributes:
        is_stock: whether stock TileLang makes the roles, and adds their threads.
        is_persistent: whether warps keep their roles in all iterations of the loop around the pipelined one.
    """

    roles: tuple[Role, ...] = ()
    channels: tuple[Channel, ...] = ()
    is_stock: bool = False
    is_persistent: bool = False

    @property
    def added(self) -> int:
        """Threads beyond the launch's that the lowering itself adds."""
        return 0 if self.is_stock else self._added

    @property
    def _added(self) -> int:
        return sum(role.threads for role in self.roles[1:])

    @property
    def has_epilogue(self) -> bool:
        """Whether a role of its own ends an iteration while the others compute the next tile."""
        return any(role.name in (COMMUNICATE, STORE) for role in self.roles)

    def with_registers(self, machine: Machine, blocks: int = 1) -> RoleGraph:
        """The graph with register counts: each role's need, and the remainder for consumers. `blocks`: number of blocks
        that an SM should hold."""
        compute, *others = self.roles
        polls = any(channel.gates for channel in self.channels) or others[-1].name == STORE
        needs = {LOAD: POLLING if polls else LOADING, COMMUNICATE: COMMUNICATING, STORE: POLLING}
        # Roles of half a warpgroup share one.
        each = [needs[role.name] for role in others][: self._added // WARPGROUP]
        left = specialise.registers_left(registers_of(machine), compute.threads, *each, blocks=blocks)
        return replace(self, roles=tuple(replace(r, registers=needs.get(r.name, left)) for r in self.roles))

    def lines(self) -> list[str]:
        """The graph in words, a line for the roles and one for each channel."""
        kind = "persistent roles" if self.is_persistent else "roles"
        roles = [
            f"{role.name} ({role.threads} threads" + (f", {role.registers} registers)" if role.registers else ")")
            for role in self.roles
        ]
        return [*([f"{kind}: {', '.join(roles)}"] if roles else []), *map(str, self.channels)]
