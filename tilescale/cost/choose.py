# SPDX-License-Identifier: MIT
"""Choice of the mechanism that moves a tile: pure functions of the machine's numbers, by `Mechanism.seconds`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilescale.errors import UnsupportedError
from tilescale.hda import Mechanism, Network
from tilescale.hda.units import format_bytes, format_time

TIE = 0.1
"""Relative difference of estimates below which they are a tie: the first in the description, or of the caller, is
taken."""

MEASURED_TIE = 0.02
"""The same for measurements: medians of one contender differ by as much from run to run."""

UNKNOWN_BYTES = 1 << 30
"""Assumed bytes of a size that is known only at launch and has no bound: bandwidth decides."""


@dataclass(frozen=True)
class MechanismChoice:
    """A choice and its reason, as text for the user."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class TileTransfer:
    """A copy from or to another unit.

    Attributes:
        operation: "put", "get" or "reduce".
        scope: kind of memory of the near side, "fragment", "shared" or "global".
        nbytes: of one copy; None if known at launch only.
        at_most: an upper bound of `nbytes` where that is known at launch only; None without one.
        row_bytes: what its contiguous rows are a multiple of.
        begin_bytes: the same for where they begin on both sides, counted from the begin of their buffers.
        programs: how many programs of a unit copy at the same time.
        whole: a copy of whole tensors, which as many programs as there are may share.
        starters: the possible initiators, "program" or "host".
    """

    operation: str
    scope: str
    nbytes: int | None
    row_bytes: int
    programs: int = 1
    whole: bool = False
    starters: tuple[str, ...] = ("program",)
    at_most: int | None = None
    begin_bytes: int = 0

    @property
    def estimated(self) -> int:
        """The size that estimates take."""
        return next((size for size in (self.nbytes, self.at_most) if size is not None), UNKNOWN_BYTES)


def mechanism(network: Network, wanted: TileTransfer, impl: str | None = None) -> MechanismChoice:
    """The mechanism for a transfer over a network: `impl` if given, else the fastest by the description. Raises
    UnsupportedError: `impl`, or without it every mechanism, cannot do it; says why."""
    against = {m.name: reason_against(m, wanted) for m in network.mechanisms}
    if impl is not None:
        reason = against[impl] if impl in against else f"{network.name} has no such mechanism"
        if reason is not None:
            raise UnsupportedError(f"impl={impl!r}: {reason}", hint="leave impl out, and the machine model chooses")
        return MechanismChoice(impl, "asked for")
    able = [m for m in network.mechanisms if against[m.name] is None and not m.on_request]
    if not able:
        found = "; ".join(f"{name}: {reason or 'on request only'}" for name, reason in against.items())
        raise UnsupportedError(
            f"no mechanism of {network.name} can carry this {wanted.operation}: {found}",
            hint="put the tile into another memory, or copy whole tensors at the level that owns them",
        )
    times = [(m.name, transfer_time(network, m, wanted)) for m in able]
    best = first_of_the_fastest(times)
    others = [f"{name}: {reason}" for name, reason in against.items() if reason is not None]
    return MechanismChoice(best, "; ".join([compared(best, times, size_text(wanted.nbytes, wanted.at_most)), *others]))


def reason_against(mechanism: Mechanism, wanted: TileTransfer) -> str | None:
    """Why a mechanism cannot make a transfer; None if it can."""
    if mechanism.rate(wanted.operation) is None:
        return f"offers no {wanted.operation}"
    if mechanism.started_by not in wanted.starters:
        return f"is started by the {mechanism.started_by}, not by the {wanted.starters[0]}"
    if mechanism.scopes and wanted.scope not in mechanism.scopes:
        return f"moves {' and '.join(mechanism.scopes)} memory, the tile lies in {wanted.scope} memory"
    if wanted.row_bytes % mechanism.alignment:
        return f"moves rows of multiples of {mechanism.alignment} bytes, these are of {wanted.row_bytes}"
    if wanted.begin_bytes % mechanism.alignment:
        return f"moves rows that begin at multiples of {mechanism.alignment} bytes, these at {wanted.begin_bytes}"
    if wanted.nbytes is None and not wanted.whole and mechanism.alignment > 1:
        return "moves boxes of constant extents, these are known at launch only"
    return None


def transfer_time(network: Network, mechanism: Mechanism, wanted: TileTransfer) -> float:
    """Seconds until a transfer has arrived, each unit's programs sharing its links."""
    each = math.inf
    if not wanted.whole:
        each = min((mechanism.rate(wanted.operation) or 0.0) / wanted.programs, mechanism.per_program or math.inf)
    return network.latency + mechanism.seconds(wanted.estimated, wanted.operation, bandwidth=each)


def first_of_the_fastest(times: Sequence[tuple[str, float]], tie: float = TIE) -> str:
    """The first name whose seconds are within a share of the least."""
    least = min(seconds for _, seconds in times)
    return next(name for name, seconds in times if seconds <= least * (1 + tie))


def size_text(nbytes: int | None, at_most: int | None = None) -> str:
    """The size of a transfer in words."""
    if nbytes is not None:
        return format_bytes(nbytes)
    return f"at most {format_bytes(at_most)}" if at_most is not None else "a size known at launch, taken as large"


def compared(best: str, times: Sequence[tuple[str, float]], size: str, how: str = "estimated") -> str:
    """As text: the time of the choice for a size, those of the others, and their origin."""
    others = [f"{name} {format_time(seconds)}" for name, seconds in times if name != best]
    mine = dict(times)[best]
    return f"{how} {format_time(mine)} for {size}" + (f"; {', '.join(others)}" if others else "")
