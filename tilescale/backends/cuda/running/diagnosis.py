# SPDX-License-Identifier: MIT
"""Errors of failed waits: the wait, its place, the value seen, and the missing rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilescale.backends.cuda.running.barrier_kernel import LastBarrier, site_of
from tilescale.backends.cuda.running.queue_watch import PATIENCE
from tilescale.backends.cuda.running.timeouts import WaitFailure, WaitReport
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.errors import OutOfBoundsError, RankMismatchError, TileScaleError, WaitTimeoutError
from tilescale.program.extents import UNFIT, unfit

_RESET = "then kernel.reset() on all ranks lets it run again"


@dataclass(frozen=True)
class ReportContext:
    """Context of the reports.

    Attributes:
        program: name of the program.
        rank: this rank.
        sites: the waits and signals of the program.
        limit_s: the limit of a wait, in seconds.
        standings: each rank's last barrier in this program, as this rank's device knows it.
        elsewhere: (rank, program) of ranks that wait for this one in another program.
        first: number of rank 0 in errors, which count all ranks of the program, not only those that share memory.
    """

    program: str
    rank: int
    sites: Sequence[WaitSite]
    limit_s: float
    standings: Sequence[LastBarrier]
    elsewhere: Sequence[tuple[int, str]] = ()
    first: int = 0

    def name(self, rank: int) -> str:
        """A rank's name in errors."""
        return f"rank {self.first + rank}"


def error_for(reports: Sequence[WaitReport], scene: ReportContext) -> TileScaleError:
    """The error for a program whose waits have failed.

    If a rank is missing at a barrier because it hangs in a wait, the wait is reported; otherwise this rank's report
    comes first.
    """
    if not reports:
        return WaitTimeoutError(
            f"{scene.program} on {scene.name(scene.rank)}: its waits were stopped before they ended", hint=_RESET
        )
    first = min(reports, key=lambda report: (report.kind is WaitFailure.ABSENT, report.rank != scene.rank, report.rank))
    site = scene.sites[first.site]
    where = None if site.where is None else replace(site.where, what=f"{scene.name(first.rank)} waits here")
    so_too = "" if first.rank == scene.rank else f"; so {scene.name(scene.rank)} stopped too"
    name = f"{scene.program} on {scene.name(first.rank)}"
    if first.kind is WaitFailure.OUTSIDE:
        return OutOfBoundsError(
            f"{name}, block {_block(first.block)}: {site.what}: element {first.index} of {first.expected}{so_too}",
            hint=f"correct the index of the flag; {_RESET}",
            where=None if site.where is None else replace(site.where, what="the flag's index"),
        )
    if first.kind is WaitFailure.ROWS:
        found = unfit(first.index == 1, first.seen, first.expected)
        return OutOfBoundsError(f"{name}: {site.what}: {found}{so_too}", hint=f"{UNFIT}; {_RESET}", where=site.where)
    if first.kind is WaitFailure.DIFFERENT:
        return RankMismatchError(f"{name}: {_difference(first, scene)}{so_too}", hint=_mismatch_hint(), where=where)
    if first.kind is WaitFailure.ABSENT and (others := _waits_elsewhere(first.rank, scene)):
        return RankMismatchError(
            f"ranks call programs in different orders: {scene.name(scene.rank)} waits in {scene.program!r}, {others}",
            hint=_mismatch_hint(),
            where=where,
        )
    found = _wait(first, site, scene)
    return WaitTimeoutError(
        f"{name}{found}{so_too}. The others: {_others(first.rank, scene)}",
        hint="look whether every rank runs the same program in the same order and sends every signal; a longer wait "
        f"takes wait_s= of tilescale.compile or TILESCALE_WAIT_S; {_RESET}",
        where=where,
    )


def _waits_elsewhere(rank: int, scene: ReportContext) -> str:
    """Ranks that are behind and wait in another program, with the program's name."""
    behind = [other for other, at in enumerate(scene.standings) if at.behind(scene.standings[rank]) > 0]
    elsewhere = [(other, program) for other, program in scene.elsewhere if other in behind]
    return ", ".join(f"{scene.name(other)} waits in {program!r}" for other, program in elsewhere)


def _wait(report: WaitReport, site: WaitSite, scene: ReportContext) -> str:
    if report.kind is WaitFailure.ABSENT:
        return f": {site.what}: {scene.name(report.index)} did not arrive in time"
    who = "copy queue" if site.queued else f"block {_block(report.block)}"
    waited_s = scene.limit_s * (PATIENCE if site.queued else 1)
    if report.kind is WaitFailure.POLL:
        return f", {who}: polled {site.flag}, element {report.index}, for {waited_s:g} s; it stays {report.seen}"
    return (
        f", {who}: waited {waited_s:g} s for {site.flag}, element {report.index}, "
        f"{site.compare} {report.expected}; it is {report.seen}"
    )


def _block(block: tuple[int, int, int]) -> str:
    last = max((axis for axis in range(3) if block[axis]), default=0)
    return f"({', '.join(map(str, block[: last + 1]))})"


def _difference(report: WaitReport, scene: ReportContext) -> str:
    here = scene.sites[report.site].what
    place = site_of(report.seen, len(scene.sites))
    if place is not None and place != report.site:
        return f"{scene.name(report.rank)} is at {here}, {scene.name(report.index)} at {scene.sites[place].what}"
    return (
        f"{scene.name(report.rank)} and {scene.name(report.index)} call it with different tensors: of other shapes, or "
        "not the same symmetric ones"
    )


def _mismatch_hint() -> str:
    return f"all ranks call the same programs, with the same symmetric tensors, in the same order; {_RESET}"


def _others(waiting: int, scene: ReportContext) -> str:
    """The progress of the other ranks, as seen from the waiting one."""
    if not scene.standings[waiting].count:
        return "unknown, as there is no barrier of all ranks around this program"
    parts = []
    for rank, at in enumerate(scene.standings):
        ahead = scene.standings[waiting].behind(at)
        if rank == waiting:
            continue
        if ahead > 0:
            parts.append(f"{scene.name(rank)} has ended its part of the call")
        elif ahead == 0:
            parts.append(f"{scene.name(rank)} is in the call too")
        else:
            place = site_of(at.purpose, len(scene.sites)) if at.count else None
            last = ", nor to an earlier one" if place is None else f"; it was last at {scene.sites[place].what}"
            parts.append(f"{scene.name(rank)} has not arrived so far{last}")
    return "; ".join(parts) or "none"
