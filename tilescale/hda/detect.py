# SPDX-License-Identifier: MIT
"""The machine at hand: the built-in description that fits its hardware, with what can be counted put in its place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilescale.errors import UnknownMachineError
from tilescale.hda.load import derive, load, names
from tilescale.hda.machine import Machine
from tilescale.hda.model import OPERATIONS, Network
from tilescale.hda.nvml import SWITCH, Accelerator, accelerators

CPU = "cpu-node"
PACKAGES = Path("/sys/devices/system/cpu")


def detect() -> Machine:
    """See `Machine.detect`.

    Counted: accelerators, their program units and memory, links between them; else sockets, cores, clock and memory.
    Everything else is the description's. Raises UnknownMachineError: there are accelerators that no description fits.
    """
    found = accelerators()
    base = _describing(found[0]) if found else load(CPU)
    changes = _accelerated(base, found) if found else _processors(base)
    machine = derive(base.name, f"{base.name} (detected)", changes)
    # The very machine that the description means keeps its name.
    return base if machine.digest == base.digest else replace(machine, identify=base.identify)


def _describing(accelerator: Accelerator) -> Machine:
    """The description whose name matches the device's, the longest name first; else one of the same architecture."""
    machines = [load(name) for name in names()]
    products = [(len(p), m) for m in machines for p in m.identify.products if p in accelerator.product]
    if products:
        return max(products, key=lambda pair: pair[0])[1]
    for machine in machines:
        if machine.identify.architecture == accelerator.architecture:
            return machine
    raise UnknownMachineError(
        f"no built-in machine describes {accelerator.product} (compute capability {accelerator.architecture})",
        hint="write a description that extends the nearest one, see docs/machines.md, and pass its path as machine=",
    )


def _accelerated(base: Machine, found: Sequence[Accelerator]) -> dict[str, Any]:
    outer = base.index(base.tensor_level.name)
    # Hardware beyond this host is not visible from it.
    levels: dict[str, Any] = {level.name: {"count": 1} for level in base.levels[outer + 1 :]}
    levels[base.tensor_level.name] = {"count": len(found)}
    if base.identify.cores and found[0].cores:
        levels[base.program_level.name] = {"count": found[0].cores // base.identify.cores}
    return {
        "title": f"{len(found)} x {found[0].product}",
        "levels": levels,
        "memory": {base.layer_for("global").name: {"capacity": f"{min(each.memory for each in found)} B"}},
        "networks": _networks(base, found),
    }


def _networks(base: Machine, found: Sequence[Accelerator]) -> dict[str, Any]:
    described = next((net for net in base.networks if net.name == base.identify.network), None)
    if described is None or not base.identify.links:
        return {}
    up = min(len(each.links) for each in found)
    if up == 0:
        return {described.name: None}
    each_link = described.bandwidth / base.identify.links
    if all(peer == SWITCH for each in found for peer in each.links):
        return {described.name: _narrowed(described, up * each_link)}
    pairs = Counter((i, j) for i, each in enumerate(found) for j in each.links if i < j)
    links = [{"between": list(pair), "bandwidth": f"{n * each_link} B/s"} for pair, n in sorted(pairs.items())]
    return {described.name: {**_narrowed(described, up * each_link), "topology": "graph", "links": links}}


def _narrowed(net: Network, bandwidth: float) -> dict[str, Any]:
    """The fields of a network whose units have only so much bandwidth, its mechanisms keeping their shares."""
    share = bandwidth / net.bandwidth
    if share == 1.0:
        return {}
    mechanisms: dict[str, Mapping[str, str]] = {}
    for mechanism in net.mechanisms:
        rates = {operation: mechanism.rate(operation) for operation in OPERATIONS}
        mechanisms[mechanism.name] = {op: f"{rate * share} B/s" for op, rate in rates.items() if rate}
    return {"bandwidth": f"{bandwidth} B/s", "mechanisms": mechanisms}


def _processors(base: Machine) -> dict[str, Any]:
    import psutil

    packages = {path.read_text().strip() for path in PACKAGES.glob("cpu[0-9]*/topology/physical_package_id")}
    sockets = max(1, len(packages))
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    memory = psutil.virtual_memory().total
    frequency = psutil.cpu_freq()
    program: dict[str, Any] = {"count": max(1, cores // sockets)}
    if frequency is not None and frequency.max:
        program["clock"] = f"{frequency.max} MHz"
    return {
        "title": f"this host: {sockets} x {program['count']} cores",
        "levels": {base.program_level.name: program, base.tensor_level.name: {"count": sockets}},
        "memory": {base.layer_for("global").name: {"capacity": f"{memory // sockets} B"}},
    }
