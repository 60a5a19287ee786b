# SPDX-License-Identifier: MIT
"""Measurements of a machine: where they are kept, which are in force, and the machine with their numbers.

A user's newest calibration takes precedence over the shipped one, which fills its gaps. Choices never follow simulated
times.

The numbers of a description follow from points by least squares of relative errors: start-up and rate of a mechanism
from its transfers, the share of the arithmetic's peak from GEMMs, latency from the smallest flag, launch from launches.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from tilescale.cost.measured import DATA, Measured, MeasuredFlag, MeasuredGemm, MeasuredLaunch, MeasuredTransfer
from tilescale.errors import UsageError
from tilescale.hda import Machine, Mechanism, Network
from tilescale.hda.model import ComputeUnit, Level
from tilescale.settings import settings

US, GB = 1e-6, 1e9

LARGE = 0.1
"""GEMMs of at least this share of the largest one's operations are bound by arithmetic."""


def folder() -> Path:
    """Folder of this user's calibrations: `calibrations` in the cache that TILESCALE_CACHE_DIR names."""
    return _folder(settings().cache)


@cache
def _folder(cache: Path) -> Path:
    return cache / "calibrations"


def own(machine: Machine) -> Measured | None:
    """This user's newest calibration of a machine, None without one. Raises as `measured`."""
    return _own(machine.name, folder())


def in_force(machine: Machine) -> Machine:
    """The machine that choices are made for: with the numbers of the user's own calibration, if there is one.

    The numbers of the built-in descriptions come from the shipped measurements. Raises as `measured`.
    """
    found = own(machine)
    return machine if found is None else _in_force(machine, found.date)


@lru_cache(maxsize=64)
def _in_force(machine: Machine, date: str) -> Machine:
    return calibrated(machine, own(machine))


def measured(machine: Machine) -> Measured | None:
    """Measurements of a machine: the user's newest, completed by the shipped ones; None for nothing. Raises UsageError:
    a file that is not a measurement; says which."""
    mine = own(machine)
    return _shipped(machine.name) if mine is None else _over_shipped(machine.name, folder())


def origin(machine: Machine) -> str:
    """The origin of the choices for a machine, identified by contents: the shipped numbers or a user's own calibration.

    Raises as `measured`.
    """
    found = own(machine)
    if found is None:
        return "what is shipped"
    return f"the calibration of {found.date} ({hashlib.sha256(found.text.encode()).hexdigest()[:8]})"


def forget() -> None:
    """Read a user's calibrations again when they are next asked for."""
    _own.cache_clear()
    _over_shipped.cache_clear()
    _in_force.cache_clear()


@cache
def _own(name: str, where: Path) -> Measured | None:
    found = (Measured.load(path) for path in sorted(where.glob(f"{name}-*.json"), reverse=True))
    real = (data for data in found if data.machine == name and not data.simulated and not data.is_empty)
    return next(real, None)


@cache
def _over_shipped(name: str, where: Path) -> Measured | None:
    mine, shipped = _own(name, where), _shipped(name)
    return mine if mine is None or shipped is None else mine.over(shipped)


@cache
def _shipped(name: str) -> Measured | None:
    path = DATA / f"{name}.json"
    return Measured.load(path) if path.exists() else None


def calibrated(machine: Machine | str, data: Measured | Path | None = None) -> Machine:
    """A machine with the numbers that were measured in the place of its description's.

    Args:
        machine: or its name, or the path of a description.
        data: measurements, or a file of them; None for those that `tilescale calibrate` has made here, else the
            shipped ones.

    Returns:
        The machine; unmeasured values stay as described.

    Raises:
        UsageError: there are no measurements of it, or they are of another machine.
        UnknownMachineError, MachineFileError: as `Machine.load`.
    """
    described = machine if isinstance(machine, Machine) else Machine.load(machine)
    found = Measured.load(data) if isinstance(data, Path) else data or measured(described)
    if found is None:
        raise UsageError(f"there are no measurements of {described.name} here", hint="run `tilescale calibrate` on it")
    if found.machine != described.name:
        raise UsageError(f"these are measurements of {found.machine}, not of {described.name}")
    linking = described.network(described.tensor_level.name)
    networks = tuple(_network(net, found) if net == linking else net for net in described.networks)
    levels = tuple(_level(at, described, found) for at in described.levels)
    return replace(described, networks=networks, levels=levels)


# -- networks ----------------------------------------------------------------------------------------------------------


def _network(network: Network, found: Measured) -> Network:
    """The network with the latency of the smallest flag, and mechanisms fitted to their transfers."""
    names = {m.name for m in network.mechanisms}
    if not names & {wire.mechanism for wire in found.wires}:
        return network
    smallest = min(found.flags, key=lambda flag: flag.nbytes, default=MeasuredFlag(nbytes=0, us=network.latency / US))
    latency = smallest.us * US if smallest.nbytes == 0 else network.latency
    mechanisms = tuple(_mechanism(m, network, latency, found.wires) for m in network.mechanisms)
    return replace(network, latency=latency, mechanisms=mechanisms)


def _mechanism(mechanism: Mechanism, network: Network, latency: float, wires: Sequence[MeasuredTransfer]) -> Mechanism:
    own = [wire for wire in wires if wire.mechanism == mechanism.name]
    alone = [wire.gb_s * GB for wire in own if wire.programs == 1]
    startup, rates = mechanism.startup, {}
    for operation in {wire.operation for wire in own}:
        points = [w for w in own if w.operation == operation and w.programs is None]
        if not points:
            continue
        fitted, rate = fit(points)
        rates[operation] = min(rate, network.bandwidth)
        if fitted is not None:
            startup = max(fitted - latency, 0.0)
    made = mechanism.map(lambda operation, rate: rates.get(operation, rate))
    return replace(made, startup=startup, per_program=max(alone) if alone else mechanism.per_program)


def fit(wires: Sequence[MeasuredTransfer]) -> tuple[float | None, float]:
    """Seconds before the first byte and bytes/s that fit transfers best: by the sum of the squares of relative errors.

    One size does not determine the seconds before the first byte: None, and the best rate.
    """
    sized = [(wire.nbytes, wire.nbytes / (wire.gb_s * GB)) for wire in wires if wire.nbytes]
    best = max(wire.gb_s for wire in wires) * GB
    if len({size for size, _ in sized}) < 2:
        return None, best
    sizes, seconds = np.array(sized, dtype=float).T
    weighted = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (startup, slope), *_ = np.linalg.lstsq(weighted, np.ones_like(sizes), rcond=None)
    return (None, best) if slope <= 0 else (max(float(startup), 0.0), 1 / float(slope))


# -- levels ------------------------------------------------------------------------------------------------------------


def _level(level: Level, machine: Machine, found: Measured) -> Level:
    if level.name == machine.tensor_level.name:
        level = replace(level, launch=_launch(found.launches, level.launch))
    return replace(level, compute=tuple(_unit(unit, machine, found.products) for unit in level.compute))


def _launch(launches: Sequence[MeasuredLaunch], described: float) -> float:
    return min((launch.us * US for launch in launches if launch.mode == "graph"), default=described)


def _unit(unit: ComputeUnit, machine: Machine, products: Sequence[MeasuredGemm]) -> ComputeUnit:
    """The unit with the share of its peak that large GEMMs reach, by their median."""
    largest = max((math.prod(product.shape) for product in products), default=0)
    large = [product for product in products if math.prod(product.shape) >= LARGE * largest]
    shares = [share for product in large for share in _shares(unit, machine, product)]
    return replace(unit, efficiency=min(statistics.median(shares), 1.0)) if shares else unit


def _shares(unit: ComputeUnit, machine: Machine, product: MeasuredGemm) -> Iterator[float]:
    """The share of a unit's peak in a GEMM, if this unit is the fastest at it."""
    rates = machine.rates(machine.tensor_level.name)
    peak = rates.get(unit.name, {}).get(product.dtype)
    if peak is not None and peak == max(other.get(product.dtype, 0.0) for other in rates.values()):
        m, n, k = product.shape
        yield 2.0 * m * n * k / (product.us * US) / peak
