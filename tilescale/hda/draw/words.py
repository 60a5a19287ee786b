# SPDX-License-Identifier: MIT
"""The phrases that every picture of a machine uses."""

from __future__ import annotations

from tilescale.errors import one
from tilescale.hda.description import Description
from tilescale.hda.model import OPERATIONS, Level, Mechanism, MemoryLayer, Network
from tilescale.hda.units import format_bandwidth, format_bytes, format_rate, format_time


def level_facts(machine: Description, level: Level) -> str:
    """Properties of a level, after its name: "up to 32 programs, 2048 threads at once"."""
    facts = []
    if level.kind == "thread_group" and level.threads != 1:
        facts.append(f"{level.threads} threads")
    if level.kind == "cluster":
        facts.append(f"made at launch, up to {level.max_size} {machine.program_level.name}s each")
    if level.kind == "program":
        facts.append(f"up to {_many(level.max_programs, 'program')} at once" if level.virtual else "one program each")
        if level.max_threads:
            facts.append(f"{level.max_threads} threads")
    return ", ".join([*facts, *level.capabilities])


def layer_facts(layer: MemoryLayer) -> str:
    """Capacity, bandwidth, latency and visibility."""
    facts = [format_bytes(layer.capacity)]
    if layer.bandwidth:
        facts.append(format_bandwidth(layer.bandwidth))
    if layer.latency:
        facts.append(format_time(layer.latency))
    facts.append("shared" if layer.shared else "private to each thread")
    if layer.cache_capacity:
        facts.append(f"cache {format_bytes(layer.cache_capacity)}")
    return ", ".join(facts)


def network_place(net: Network) -> str:
    """Units that a network connects: "devices of a node"."""
    return f"{net.level}s of {one(net.within)}" if net.within else f"all {net.level}s"


def shape(net: Network) -> str:
    """Its topology with dimensions: "mesh 8 x 8"."""
    return f"{net.topology} {' x '.join(map(str, net.dims))}".strip()


def network_facts(net: Network) -> str:
    """Topology, bandwidth, latency."""
    link = ""
    if net.link_bandwidth and net.link_bandwidth != net.bandwidth:
        link = f" ({format_bandwidth(net.link_bandwidth)} a {'port' if net.ports else 'link'})"
    return f"{shape(net)}, {format_bandwidth(net.bandwidth)} per {net.level}{link}, {format_time(net.latency)}"


def mechanism_facts(mechanism: Mechanism) -> str:
    """Bandwidth of each operation and the start-up time."""
    rates = [(op, mechanism.rate(op)) for op in OPERATIONS]
    facts = [f"{op} {format_bandwidth(rate)}" for op, rate in rates if rate is not None]
    if mechanism.startup:
        facts.append(f"start {format_time(mechanism.startup)}")
    return ", ".join(facts)


def arithmetic(machine: Description, level: str) -> list[tuple[str, str]]:
    """Kinds of arithmetic of one unit of `level` with their rates, grouped where data types share one."""
    lines = []
    for unit, rates in machine.rates(level).items():
        groups: dict[float, list[str]] = {}
        for dtype, rate in rates.items():
            groups.setdefault(rate, []).append(dtype)
        lines.append((unit, ";  ".join(f"{', '.join(names)} {format_rate(rate)}" for rate, names in groups.items())))
    return lines


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
