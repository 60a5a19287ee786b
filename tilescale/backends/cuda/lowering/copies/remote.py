# SPDX-License-Identifier: MIT
"""What copies to and from addresses of other devices share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.copies.rows import LOADED, nest
from tilescale.backends.cuda.lowering.deferred import KEPT, NO_SIGNAL
from tilescale.backends.cuda.lowering.devices import DeviceStage
from tilescale.backends.cuda.lowering.markers import AHEAD
from tilescale.backends.cuda.lowering.signals import signal_peer
from tilescale.program.operations import Copy


@dataclass(frozen=True)
class RemoteCopy:
    """A copy between a tile here and one of a peer.

    Attributes:
        slot: where the peer's instances lie in the heap's address range.
        regions: source and target, as a tile operation takes them.
    """

    stage: DeviceStage
    copy: Copy
    slot: ir.PrimExpr
    regions: tuple[ir.Call, ir.Call]

    @classmethod
    def of(cls, stage: DeviceStage, call: ir.Call) -> RemoteCopy:
        """A copy of tiles, which is noted."""
        copy = Copy.of(call)
        buffer, begins, extents = ir.region_parts(copy.far)
        slot = stage.slot(stage.device_number(copy.level, stage.expr(copy.peer)))
        begins, extents = ([stage.expr(n) for n in part] for part in (begins, extents))
        access = "w" if copy.to_peer else "r"
        remote = tir.region(stage.peers(buffer.data), [slot, *begins], [1, *extents], access)
        local = stage.expr(copy.near)
        names = [name.removesuffix("_view") for name in (ir.region_parts(copy.near)[0].name, buffer.name)]
        what = f"T.copy({names[0]}, {names[1]}, {'dst' if copy.to_peer else 'src'}=)"
        choice = stage.choice(call)
        how = choice if ir.attribute(call, AHEAD) is None else f"{choice.name} (by the producer, ahead of its use)"
        stage.notes.append(f"{what}: {how}")
        if copy.to_peer and (when := _completed(stage, copy)):
            stage.notes.append(f"{what}: {when}")
        return cls(stage, copy, slot, (local, remote) if copy.to_peer else (remote, local))

    def made(self, name: str, **how: Any) -> ir.Stmt:
        """The copy by a tile operation, and the signal behind it."""
        is_loaded = ir.attribute(self.copy.call, LOADED) is not None
        copied = nest(*self.regions) if is_loaded else tir.tile_call(name, *self.regions, **how)
        if self.copy.signal is None:
            return copied
        return tir.sequence([copied, signal_peer(self.stage, self.copy.call, self.slot)])


def _completed(stage: DeviceStage, copy: Copy) -> str | None:
    """When a copy to a peer is complete, in words; None where the next signal, barrier or the end says so."""
    kept = ir.attribute(copy.call, KEPT)
    if kept is not None:
        later = "its tile is written again" if kept == NO_SIGNAL else "the next turn of the loop ends"
        return f"asynchronous, completed before {later}"
    if stage.roles.beside:
        return "asynchronous, completed and signalled by threads of their own"
    return None if copy.signal is None else "synchronous: its signal follows at once"
