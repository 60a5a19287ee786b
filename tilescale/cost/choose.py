# SPDX-License-Identifier: MIT
"""Which mechanism moves a tile, and which implementation a collective takes: pure functions of the machine's numbers.

Times follow the postal model (latency and start-up for each message, bytes over bandwidth; Bar-Noy and Kipnis, 1994),
collectives the counts of messages and bytes of their algorithms (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilescale.errors import UnsupportedError
from tilescale.hda import Mechanism, Network
from tilescale.hda.units import format_bytes, format_time

TIE = 0.1
"""Estimates that differ by less than this share say nothing: what the description or the caller has first is taken."""

UNKNOWN_BYTES = 1 << 30
"""What a size that is known at launch only counts as: bandwidth decides."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why, in words for a person."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Transfer:
    """A copy from or to another unit.

    Attributes:
        operation: "put", "get" or "reduce".
        scope: kind of memory of the near side, "fragment", "shared" or "global".
        nbytes: of one copy; None if known at launch only.
        row_bytes: what its contiguous rows are a multiple of.
        programs: how many programs of a unit copy at the same time.
        whole: a copy of whole tensors, which as many programs as there are may share.
        starters: who can start it, "program" or "host".
    """

    operation: str
    scope: str
    nbytes: int | None
    row_bytes: int
    programs: int = 1
    whole: bool = False
    starters: tuple[str, ...] = ("program",)


def mechanism(network: Network, wanted: Transfer, impl: str | None = None) -> Choice:
    """The mechanism for a transfer over a network: `impl` if given, else the fastest by the description.

    Raises:
        UnsupportedError: `impl`, or without it every mechanism, cannot do it; says why.
    """
    against = {m.name: reason_against(m, wanted) for m in network.mechanisms}
    if impl is not None:
        reason = against[impl] if impl in against else f"{network.name} has no such mechanism"
        if reason is not None:
            raise UnsupportedError(f"impl={impl!r}: {reason}", hint="leave impl out, and the machine model chooses")
        return Choice(impl, "asked for")
    able = [m for m in network.mechanisms if against[m.name] is None and not m.on_request]
    if not able:
        found = "; ".join(f"{name}: {reason or 'on request only'}" for name, reason in against.items())
        raise UnsupportedError(
            f"nothing of {network.name} carries this {wanted.operation}: {found}",
            hint="put the tile into another memory, or copy whole tensors at the level that owns them",
        )
    times = [(m.name, transfer_time(network, m, wanted)) for m in able]
    best = _first_of_the_fastest(times)
    others = [f"{name}: {reason}" for name, reason in against.items() if reason is not None]
    return Choice(best, "; ".join([_compared(best, times, wanted.nbytes), *others]))


def reason_against(mechanism: Mechanism, wanted: Transfer) -> str | None:
    """Why a mechanism cannot make a transfer; None if it can."""
    if mechanism.rate(wanted.operation) is None:
        return f"offers no {wanted.operation}"
    if mechanism.started_by not in wanted.starters:
        return f"is started by the {mechanism.started_by}, not by the {wanted.starters[0]}"
    if mechanism.scopes and wanted.scope not in mechanism.scopes:
        return f"moves {' and '.join(mechanism.scopes)} memory, the tile lies in {wanted.scope} memory"
    if wanted.row_bytes % mechanism.alignment:
        return f"moves rows of multiples of {mechanism.alignment} bytes, these are of {wanted.row_bytes}"
    return None


def transfer_time(network: Network, mechanism: Mechanism, wanted: Transfer) -> float:
    """Seconds until a transfer has arrived, each unit's programs sharing its links."""
    rate = mechanism.rate(wanted.operation) or 0.0
    if not wanted.whole:
        rate = min(rate / wanted.programs, mechanism.per_program or rate)
    return network.latency + mechanism.startup + _size(wanted.nbytes) / rate


# -- collectives -------------------------------------------------------------------------------------------------------

_STEPS: dict[tuple[str, str], Callable[[int], tuple[int, float, float]]] = {
    ("allreduce", "one_shot"): lambda n: (1, 1, n - 1),
    ("allreduce", "two_shot"): lambda n: (2, 2, 2 * (n - 1) / n),
    ("allreduce", "ring"): lambda n: (0, 2 * (n - 1), 2 * (n - 1) / n),
    ("allreduce", "nccl"): lambda n: (0, 2 * (n - 1), 2 * (n - 1) / n),
    ("allreduce", "tree"): lambda n: (0, 2 * math.log2(n), 2),
    ("reduce_scatter", "direct"): lambda n: (1, 1, (n - 1) / n),
    ("reduce_scatter", "ring"): lambda n: (0, n - 1, (n - 1) / n),
    ("reduce_scatter", "nccl"): lambda n: (0, n - 1, (n - 1) / n),
    ("all_gather", "direct"): lambda n: (1, 1, (n - 1) / n),
    ("all_gather", "ring"): lambda n: (0, n - 1, (n - 1) / n),
    ("all_gather", "copy_engine"): lambda n: (1, 1, (n - 1) / n),
    ("all_gather", "nccl"): lambda n: (0, n - 1, (n - 1) / n),
    ("all_to_all", "direct"): lambda n: (1, 1, (n - 1) / n),
    ("all_to_all", "copy_engine"): lambda n: (1, 1, (n - 1) / n),
    ("all_to_all", "nccl"): lambda n: (0, n - 1, (n - 1) / n),
    ("broadcast", "direct"): lambda n: (1, 1, n - 1),
    ("broadcast", "tree"): lambda n: (0, math.log2(n), math.log2(n)),
    ("broadcast", "nccl"): lambda n: (0, n - 1, 1),
}
"""(operation, implementation) -> for n units: meetings and steps that follow one another, and how many times the whole
tensor the busiest unit sends, all pipelines cut finely. NCCL's are those of its rings. `tilescale.timing.collectives`
has the same algorithms message by message, for networks that are not one switch."""


def collective(
    network: Network | None,
    operation: str,
    units: int,
    nbytes: int | None,
    able: Sequence[str],
    impl: str | None = None,
) -> Choice:
    """The implementation of a collective: `impl` if given, else the fastest of those that the caller has.

    Args:
        network: what connects the units; None where no description says so.
        operation: its name, e.g. "allreduce".
        nbytes: of the whole tensor: the result of all_gather, the source of the others; None if known at launch only.
        able: implementations that the caller has for these tensors, preferred ones first.

    Raises:
        UnsupportedError: `impl` is not one of them.
    """
    if impl is not None and impl not in able:
        raise UnsupportedError(
            f"impl={impl!r} of T.{operation}: here there is {', '.join(able)}",
            hint="leave impl out, and the machine model chooses",
        )
    if impl is not None:
        return Choice(impl, "asked for")
    if len(able) == 1 or network is None or units == 1:
        return Choice(able[0], "the only one" if len(able) == 1 else "nothing to compare")
    times = [(name, collective_time(network, operation, name, units, nbytes)) for name in able]
    best = _first_of_the_fastest(times)
    return Choice(best, _compared(best, times, nbytes))


def collective_time(network: Network, operation: str, impl: str, units: int, nbytes: int | None) -> float:
    """Seconds of a collective over `units` units of a network."""
    meetings, steps, share = _STEPS[operation, impl](units)
    carrier = network.mechanism(impl)
    if carrier is None:
        by_programs = [m for m in network.mechanisms if m.started_by == "program" and m.put and not m.on_request]
        carrier = max(by_programs or network.mechanisms, key=lambda m: m.put or 0.0)
    # What the host starts it starts one after the other.
    startups = steps * (units - 1 if carrier.started_by == "host" else 1)
    latencies = (meetings + steps) * network.latency + startups * carrier.startup
    return network.setup(impl) + latencies + share * _size(nbytes) / (carrier.put or network.bandwidth)


def _size(nbytes: int | None) -> int:
    return UNKNOWN_BYTES if nbytes is None else nbytes


def _first_of_the_fastest(times: Sequence[tuple[str, float]]) -> str:
    least = min(seconds for _, seconds in times)
    return next(name for name, seconds in times if seconds <= least * (1 + TIE))


def _compared(best: str, times: Sequence[tuple[str, float]], nbytes: int | None) -> str:
    what = format_bytes(nbytes) if nbytes is not None else "a size known at launch, taken as large"
    others = [f"{name} {format_time(seconds)}" for name, seconds in times if name != best]
    mine = dict(times)[best]
    return f"estimated {format_time(mine)} for {what}" + (f"; {', '.join(others)}" if others else "")
