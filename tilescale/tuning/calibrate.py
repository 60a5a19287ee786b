# SPDX-License-Identifier: MIT
"""Measure a machine: all probes, on all ranks together, interleaved, within a time limit."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tilescale.cost.calibrated import folder, forget
from tilescale.cost.measured import KINDS, Measured, MeasuredContention
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.tuning import probes
from tilescale.tuning.files import save
from tilescale.tuning.places import TimeSource
from tilescale.tuning.probes import ProbeGroup, groups
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import Heat, race
from tilescale.tuning.versions import versions

ROUNDS = 5
"""Groups of calls of each probe."""


def calibrate(place: TimeSource, steps: ProgressSteps, *, quick: bool = False, limit_s: float = 150.0) -> Measured:
    """Measure; collective. Raises UsageError: the GPUs are not those of the machine, or its programs own tensors.

    Args:
        quick: leave out most sizes: to see that it works.
        limit_s: seconds after which the remaining points stay unmeasured.
    """
    check(place)
    begin = time.monotonic()
    points: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    out: dict[str, dict[str, str]] = {}
    steps.begin(sum(1 for _ in groups(place, quick)), "")
    with use_machine(place.machine):
        for group in groups(place, quick):  # anew, so that each one's tensors go with it
            if place.team.broadcast(time.monotonic() - begin > limit_s):
                break
            steps.step(group.title)
            points[group.kind] += _points(place, group, out.setdefault(group.of, {}) if group.of else {})
    made = {kind: tuple(found) for kind, found in points.items()}
    return Measured(
        machine=place.machine.name,
        gpu="" if place.simulated else place.name,
        units=place.units,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        source=f"tilescale calibrate, {ROUNDS} interleaved rounds",
        simulated=place.simulated,
        **made,
    )


def keep(found: Measured) -> Path:
    """Write a calibration into the user's cache, where choices find it. Raises UsageError: it has no points, or the
    cache cannot be written."""
    if found.is_empty:
        raise UsageError("nothing was measured within the limit", hint="allow more: tilescale calibrate --limit 300")
    stamp = found.date.replace(":", "").split("+")[0]
    path = folder() / f"{found.machine}-{stamp}{'-simulated' if found.simulated else ''}.json"
    save(path, found.text)
    forget()
    return path


def check(place: TimeSource) -> None:
    """Raise UsageError if probes cannot measure that machine here, as `calibrate` does."""
    machine = place.machine
    if machine.tensor_level == machine.program_level:
        raise UsageError(
            f"programs of {machine.name} own their tensors; there is nothing above them that a calibration measures"
        )
    products = machine.identify.products
    if not place.simulated and products and not any(product in place.name for product in products):
        raise UsageError(
            f"the GPUs here are {place.name}, {machine.name} has {', '.join(products)}",
            hint=f"name their machine: --machine {_fitting(place.name)}",
        )


def _fitting(gpu: str) -> str:
    """The built-in machine with such GPUs, or what to write instead."""
    known = [Machine.load(name) for name in Machine.names()]
    return next((m.name for m in known if any(p in gpu for p in m.identify.products)), "YOUR-DESCRIPTION.yaml")


def _points(place: TimeSource, group: ProbeGroup, out: dict[str, str]) -> list[Any]:
    """Points measured of a group; `out` maps known failures to their reasons, and new ones are added."""
    entries = [probe.contender for probe in group.probes]
    heat = Heat(group.title, (), probes.TYPE, place.units, group.mode, entries[0].name, entries, calls=group.calls)
    rows = race(heat, place.timer(group.mode), place.team, 1 if place.simulated else ROUNDS, seeds=range(1), out=out)
    out |= {row["contender"]: row["failed"] for row in rows if row["us"] is None}
    if group.kind == "contention":
        return [_contention(row) for row in rows[1:] if row["ratio"] is not None]
    timed = [(probe, row) for probe, row in zip(group.probes, rows, strict=True) if row["us"] is not None]
    return [probe.point(row["us"], tuple(row["spread"])) for probe, row in timed]


def _contention(row: dict[str, Any]) -> MeasuredContention:
    ratio, us, (low, high) = row["ratio"], row["us"], row["spread"]
    return MeasuredContention(
        mechanism=row["contender"], shape=probes.CONTENDED_SHAPE, dtype=probes.TYPE, ratio=ratio,
        spread=(round(ratio * low / us, 4), round(ratio * high / us, 4)),
    )  # fmt: skip
