# SPDX-License-Identifier: MIT
"""Copies between devices that reach each other's memory: by loads and stores of all threads, or by bulk copies, which
one thread issues.

A bulk copy that is completed an iteration later is only issued here (`completion.py`); so is a load that an mbarrier
counts. The issuing thread waits until any other one has read its tile: what follows may write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.copy_nests import nest
from tilescale.backends.tilelang.lowering.copies.rows import UNKNOWN
from tilescale.backends.tilelang.lowering.deferred_stores import KEPT, NO_SIGNAL
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import AHEAD, BARRIER, by_nvshmem
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.reach import BULK, STORES
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.signals import signal_peer
from tilescale.errors import UnsupportedError
from tilescale.program import ops
from tilescale.program.operations import Copy


@lowers(ops.COPY.name, impl=STORES)
def _by_threads(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    return RemoteCopy.of(stage, call).made("copy", disable_tma=1)


@lowers(ops.COPY.name, impl=BULK)
def _in_bulk(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    remote = RemoteCopy.of(stage, call)
    barrier = ir.attribute(call, BARRIER)
    if barrier is not None:
        return remote.made("tma_copy", barrier=stage.expr(barrier), is_tma_copy=1)
    if remote.copy.to_peer and ir.attribute(call, KEPT) is not None:
        return remote.made("tma_copy")
    if remote.copy.to_peer or ir.attribute(call, AHEAD) is not None:
        return remote.made("copy", prefer_instruction=ir.StringImm(BULK))
    return _counted(stage, remote)


def _counted(stage: DeviceStage, remote: RemoteCopy) -> ir.Stmt:
    """A load that is awaited at once. A variable counts its executions, for the parity of its mbarrier: TileLang takes
    the iteration of the innermost loop, which is another number in branches, nested loops and `while`."""
    zero = ir.IntImm("int32", 0)
    count = tir.local_buffer(f"loads{stage.next_number()}", [1], "int32", ir.VARIABLE)
    number = ir.BufferLoad(count, [zero])
    stage.tiles.append(count)
    stage.begins.append(ir.BufferStore(count, zero, [zero]))
    copied = remote.made("copy", prefer_instruction=ir.StringImm(BULK), **{tl.PARITY: number % 2})
    return tir.sequence([copied, ir.BufferStore(count, number + 1, [zero])])


def ahead(phase: Phase, call: ir.Call) -> ir.Call | None:
    """A remote TMA load that the producer issues, for a copy from a peer; None if it cannot be one, or another
    mechanism is requested."""
    if by_nvshmem(call) or ir.attribute(call, "impl") not in (None, BULK):
        return None
    notes = {**dict(call.annotations), "impl": ir.StringImm(BULK), AHEAD: ir.IntImm("int32", 1)}
    made = ir.Call(call.dtype, call.op, list(call.args), notes)
    try:
        phase.choice(made)
    except UnsupportedError:
        return None
    return made


@dataclass(frozen=True)
class RemoteCopy:
    """A copy between a tile here and one of a peer.

    Attributes:
        slot: the peer's slot in the heap's address range.
        regions: source and target, as arguments of a tile operation.
    """

    stage: DeviceStage
    copy: Copy
    slot: ir.PrimExpr
    regions: tuple[ir.Call, ir.Call]

    @classmethod
    def of(cls, stage: DeviceStage, call: ir.Call) -> RemoteCopy:
        """A copy of tiles, with a note."""
        copy = Copy.of(call)
        buffer, begins, extents = ir.region_parts(copy.far)
        slot = stage.slot(stage.device_number(copy.level, stage.expr(copy.peer)))
        begins, extents = ([stage.expr(n) for n in part] for part in (begins, extents))
        access = "w" if copy.to_peer else "r"
        remote = tir.region(stage.far(buffer), [slot, *begins], [1, *extents], access)
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
        """The copy by a tile operation, and the signal after it."""
        is_unknown = ir.attribute(self.copy.call, UNKNOWN) is not None
        copied = nest(*self.regions) if is_unknown else tir.tile_call(name, *self.regions, **how)
        if self.copy.signal is None:
            return copied
        return tir.sequence([copied, signal_peer(self.stage, self.copy.call, self.slot)])


def _completed(stage: DeviceStage, copy: Copy) -> str | None:
    """A description of when a copy to a peer is complete; None where this is at the next signal, barrier or the end."""
    kept = ir.attribute(copy.call, KEPT)
    if kept is not None:
        later = "its tile is written again" if kept == NO_SIGNAL else "the next iteration of the loop ends"
        return f"asynchronous, completed before {later}"
    if stage.phase.graph.has_epilogue:
        return "asynchronous, completed and signalled by dedicated threads"
    return None if copy.signal is None else "synchronous: its signal follows at once"
