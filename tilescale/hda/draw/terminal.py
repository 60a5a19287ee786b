# SPDX-License-Identifier: MIT
"""A machine on a console: a tree of its levels with their memory, then its networks and its rates."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tilescale.errors import one
from tilescale.hda.draw import words
from tilescale.hda.machine import Machine
from tilescale.hda.model import OPERATIONS, Level, Network
from tilescale.hda.units import format_bandwidth, format_bytes, format_count, format_rate, format_time

LEVEL, MEMORY, NETWORK, QUIET = "bold cyan", "green", "magenta", "dim"


def listing(machines: Iterable[Machine]) -> RenderableType:
    """A table of machines: name, description, units that hold tensors, and the network between them.

    Two lines for each, as terminals have 80 columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style=LEVEL)
    table.add_column()
    for machine in machines:
        owner, layer = machine.tensor_level, machine.layer_for("global")
        net = machine.network(owner.name)
        units = format_count(machine.count(owner.name), owner.name)
        facts = Text.assemble(f"{units} of ", (format_bytes(layer.capacity), MEMORY))
        if net is not None:
            facts.append(", between them ").append(f"{net.name} {format_bandwidth(net.bandwidth)}", NETWORK)
        table.add_row(machine.name, Text.assemble(machine.title, "\n", facts))
    return table


def picture(machine: Machine) -> RenderableType:
    """Overview of a machine, from the whole to its threads."""
    head = Text.assemble((machine.name, "bold"), "  ", machine.title)
    about = Text(machine.description, QUIET)
    parts: list[RenderableType] = [head, about, Text(), _tree(machine)]
    if machine.networks:
        parts += [Text(), Text("networks", "bold"), Padding(_networks(machine.networks), (0, 0, 0, 2), expand=False)]
    if machine.rates(machine.tensor_level.name):
        parts += [Text(), Text("peak rates", "bold"), Padding(_rates(machine), (0, 0, 0, 2), expand=False)]
    if machine.capabilities:
        parts += [Text(), Text.assemble(("capabilities  ", "bold"), ", ".join(machine.capabilities))]
    return Group(*parts)


def _tree(machine: Machine) -> Tree:
    coarsest = machine.levels[-1]
    root = Tree(_level(machine, coarsest), guide_style=QUIET)
    here = root
    for level, finer in zip(reversed(machine.levels), [*machine.levels[-2::-1], None], strict=True):
        for layer in reversed([m for m in machine.memory if m.level == level.name]):
            title = f"{layer.name} {layer.title}".strip()
            here.add(Text.assemble((f"▤ {title}", MEMORY), f"  {words.layer_facts(layer)}"))
        if finer is None:
            break
        here = here.add(_level(machine, finer))
    return root


def _level(machine: Machine, level: Level) -> Text:
    text = Text.assemble((f"{_times(machine, level)}{level.name}", LEVEL))
    if level.title:
        text.append(f" {level.title}")
    facts = words.level_facts(machine, level)
    if facts:
        text.append(f"  {facts}", QUIET)
    for net in (n for n in machine.networks if n.level == level.name):
        scope = f" within {one(net.within)}" if net.within else ""
        text.append(f"\n  ⇄ {net.name}", NETWORK)
        text.append(f"{scope}: {', '.join([words.network_facts(net), *net.capabilities])}", QUIET)
    return text


def _times(machine: Machine, level: Level) -> str:
    """Number of units in the next coarser level; clusters come and go with launches."""
    if level.kind == "cluster":
        return ""
    coarser = [at for at in machine.levels[machine.index(level.name) + 1 :] if at.kind != "cluster"]
    number = machine.count(level.name, coarser[0].name if coarser else None)
    most = "up to " if level.kind == "thread_group" and coarser[0].kind == "program" and number > 1 else ""
    return f"{most}{number} × "


def _networks(networks: Iterable[Network]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    for heading in ("network", "layer", "mechanism"):
        table.add_column(heading, no_wrap=True)
    for heading in ("put", "get", "reduce", "startup"):
        table.add_column(heading, no_wrap=True, justify="right")
    for net in networks:
        start = [Text(net.name, NETWORK), Text(net.reaches, MEMORY)]
        for mechanism in net.mechanisms:
            rates = (mechanism.rate(operation) for operation in OPERATIONS)
            shown = ["-" if rate is None else format_bandwidth(rate) for rate in rates]
            startup = format_time(mechanism.startup) if mechanism.startup else "-"
            table.add_row(*start, mechanism.name, *shown, startup)
            start = [Text(), Text()]
    return table


def _rates(machine: Machine) -> Table:
    owner, program = machine.tensor_level.name, machine.program_level.name
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    for heading in ("arithmetic", "data type", *dict.fromkeys((f"one {program}", f"one {owner}"))):
        table.add_column(heading, justify="right" if heading.startswith("one ") else "left")
    for unit, rates in machine.rates(program).items():
        shown = unit
        for dtype, rate in rates.items():
            cells = [format_rate(rate)]
            if owner != program:
                cells.append(format_rate(machine.rate(owner, unit, dtype)))
            table.add_row(shown, dtype, *cells)
            shown = ""
    return table
