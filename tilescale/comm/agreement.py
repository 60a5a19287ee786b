# SPDX-License-Identifier: MIT
"""Agreement of ranks on the program they call; if they differ, the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.errors import RankMismatchError, picklable


@dataclass(frozen=True)
class Facts:
    """Facts that must be the same on all ranks.

    Attributes:
        program: the program's name.
        fingerprint: digest of its traced code, shapes included.
        machine: name and digest of the machine it is compiled for.
        options: the options of the compiler, as text.
        calibration: what choices follow: of schedules, algorithms and mechanisms, which show in no program.
    """

    program: str
    fingerprint: str
    machine: tuple[str, str]
    options: str = ""
    calibration: str = ""


def agree(group: HeapGroup, facts: Facts, code: Callable[[], str], error: BaseException | None = None) -> None:
    """Collective: all ranks call the same program; else raise RankMismatchError, which names both programs, or the
    measurements that their choices follow.

    Args:
        group: the ranks.
        facts: of this rank's program.
        code: its text, which is compared where programs differ.
        error: this rank's error in preparing the program; raised on all ranks that call the same one.
    """
    call = CollectiveCall.here("kernel")
    everyone = group.all_gather(call, (facts, call.where, sent(error)))
    first = everyone[0][0]
    for rank, (other, place, _) in enumerate(everyone):
        if other != first:
            lines = partial(_lines, group, call, code, rank)
            message, hint = _difference(first, other, rank, lines)
            where = [replace(everyone[0][1], what="rank 0"), replace(place, what=f"rank {rank}")]
            raise RankMismatchError(message, hint=hint, where=where)
    raise_any(error, [each for _, _, each in everyone])


def sent(error: BaseException | None) -> BaseException | None:
    """An error as the other ranks get it."""
    return None if error is None else picklable(error)


def raise_any(own: BaseException | None, errors: Sequence[BaseException | None]) -> None:
    """Raise this rank's error, or the first one of all ranks."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            error.__notes__ = [*getattr(error, "__notes__", ()), f"raised on rank {rank}"]
            raise error


def _difference(first: Facts, other: Facts, rank: int, lines: Callable[[], str]) -> tuple[str, str]:
    """The difference, and the remedy. `lines` describes differences in the programs' code; collective."""
    if first.calibration != other.calibration:
        by = f"rank 0 by {first.calibration}, rank {rank} by {other.calibration}"
        return (
            f"ranks choose by different measurements of {first.machine[0]!r}: {by}",
            "copy the file that `tilescale calibrate` wrote to all nodes, where TILESCALE_CACHE_DIR says",
        )
    return (
        f"ranks call different programs: {_in_programs(first, other, rank, lines)}",
        "all ranks call the same program, traced with the same shapes, in the same order",
    )


def _lines(group: HeapGroup, call: CollectiveCall, code: Callable[[], str], rank: int) -> str:
    """Collective: where the program of rank 0 and that of another one begin to differ."""
    texts = group.all_gather(call, code())
    lines = zip_longest(*(texts[r].splitlines() for r in (0, rank)), fillvalue="no more")
    here, there = next(((a.strip(), b.strip()) for a, b in lines if a != b), ("", ""))
    return f"`{here}` on rank 0, `{there}` on rank {rank}"


def _in_programs(first: Facts, other: Facts, rank: int, lines: Callable[[], str]) -> str:
    if first.program != other.program:
        return f"rank 0 calls {first.program!r}, rank {rank} calls {other.program!r}"
    if first.machine != other.machine:
        return f"{first.program!r} for {first.machine[0]!r} on rank 0, for {other.machine[0]!r} on rank {rank}"
    if first.options != other.options:
        return f"{first.program!r} with {first.options} on rank 0, with {other.options} on rank {rank}"
    which = f"{first.program!r} of rank 0 and of rank {rank}"
    return f"{which} differ in their shapes, constants or statements: {lines()}"
