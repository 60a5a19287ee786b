# SPDX-License-Identifier: MIT
"""Checks between the fields of a description: names that must exist, orders and sums that must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from keyword import iskeyword

from tilescale.errors import MachineFileError, one
from tilescale.hda.description import Description
from tilescale.hda.document import DocumentEntry
from tilescale.hda.model import KINDS, OPERATIONS, Level, MemoryLayer, Network

_ONLY = {
    "threads": ("thread_group",),
    "count": ("program", "unit"),
    "max_size": ("cluster",),
    "virtual": ("program",),
    "max_programs": ("program",),
    "max_threads": ("program",),
    "max_threads_per_program": ("program",),
    "barrier": ("program",),
    "launch": ("program", "unit"),
    "clock": ("program",),
    "compute": ("program", "unit"),
}
TAKEN = ("threads", "prelude", "cluster_dims", "in_order")
"""Keywords of a launch that are not levels: T.Kernel(device=4, threads=128)."""

_NEEDED = {"thread_group": "threads", "program": "count", "cluster": "max_size", "unit": "count"}


def check(machine: Description, document: DocumentEntry) -> Iterator[MachineFileError]:
    """Every problem of a machine whose fields are right one by one; each names its file, line and field."""
    found = list(_levels(machine, document))
    yield from found
    if found:
        return  # layers and networks refer to levels
    for layer in machine.memory:
        yield from _layer(machine, layer, document.find(f"memory.{layer.name}"))
    yield from _layers(machine, document)
    for net in machine.networks:
        yield from _network(machine, net, document.find(f"networks.{net.name}"))


def _levels(machine: Description, document: DocumentEntry) -> Iterator[MachineFileError]:
    for level in machine.levels:
        entry = document.find(f"levels.{level.name}")
        if not level.name.isidentifier() or iskeyword(level.name) or level.name in TAKEN:
            yield entry.problem(
                f"{level.name!r} cannot be the name of a level",
                hint=f"programs write T.Kernel(name=...): take letters, digits and _, and none of {', '.join(TAKEN)}",
            )
        for field, kinds in _ONLY.items():
            if field in entry.value and level.kind not in kinds:
                yield entry.find(field).problem(f"only levels of kind {' or '.join(kinds)} have it")
        if _NEEDED[level.kind] not in entry.value:
            yield entry.problem(f"a level of kind {level.kind} needs the field {_NEEDED[level.kind]!r}")
    yield from _level_order(machine, document.find("levels"))
    yield from _group_sizes(machine, document.find("levels"))


def _level_order(machine: Description, levels: DocumentEntry) -> Iterator[MachineFileError]:
    programs = [level.name for level in machine.levels if level.kind == "program"]
    if len(programs) != 1:
        named = f"found {', '.join(programs)}" if programs else "found none"
        yield levels.problem(f"expected exactly one level of kind program, {named}")
    for before, after in zip(machine.levels, machine.levels[1:], strict=False):
        if KINDS.index(before.kind) > KINDS.index(after.kind):
            yield levels.find(after.name).problem(
                f"a level of kind {after.kind} cannot come after one of kind {before.kind}",
                hint=f"levels are listed finest first: {', then '.join(KINDS)}",
            )


def _group_sizes(machine: Description, levels: DocumentEntry) -> Iterator[MachineFileError]:
    groups = [level for level in machine.levels if level.kind == "thread_group" and level.threads]
    for fine, coarse in zip(groups, groups[1:], strict=False):
        if not _multiple(coarse.threads, fine.threads):
            yield levels.find(f"{coarse.name}.threads").problem(
                f"expected a multiple of the {fine.threads} threads of {one(fine.name)}, found {coarse.threads}"
            )


def _multiple(coarse: int | None, fine: int | None) -> bool:
    return bool(coarse and fine and coarse > fine and coarse % fine == 0)


def _named(level: str | None, levels: Sequence[Level], entry: DocumentEntry, what: str) -> Iterator[MachineFileError]:
    names = [at.name for at in levels]
    if level is not None and level not in names:
        yield entry.problem(f"expected {what}: {', '.join(names) or 'there is none'}; found {level!r}")


def _layer(machine: Description, layer: MemoryLayer, entry: DocumentEntry) -> Iterator[MachineFileError]:
    owners = [level for level in machine.levels if level.kind in ("program", "unit")]
    groups = [level for level in machine.levels if level.kind == "thread_group"]
    yield from _named(layer.level, owners, entry.find("level"), "a program or unit level of this machine")
    yield from _named(layer.granularity_per, groups, entry.find("granularity_per"), "a level of kind thread_group here")
    for field in ("per_program_max", "per_thread_max", "reserved_per_program"):
        size: int | None = getattr(layer, field)
        if size is not None and size > layer.capacity:
            yield entry.find(field).problem("more than the layer's capacity")
    if layer.sustained and layer.sustained > (layer.bandwidth or 0):
        yield entry.find("sustained").problem("more than the layer's peak `bandwidth`")


def _layers(machine: Description, document: DocumentEntry) -> Iterator[MachineFileError]:
    memory = document.find("memory")
    for scope in ("fragment", "shared", "global"):
        holders = [layer.name for layer in machine.memory if scope in layer.scopes]
        if len(holders) != 1:
            yield memory.problem(
                f"expected exactly one layer with scope {scope!r}, found {', '.join(holders) or 'none'}"
            )


def _network(machine: Description, net: Network, entry: DocumentEntry) -> Iterator[MachineFileError]:
    linked = [level for level in machine.levels if level.kind != "thread_group"]
    yield from _named(
        net.level, linked, entry.find("level"), "a level of this machine that is not of kind thread_group"
    )
    if net.level not in machine.level_names:
        return
    at = machine.index(net.level)
    found = [
        *_named(net.within, machine.levels[at + 1 :], entry.find("within"), "a level coarser than the network's"),
        *_named(net.ports, [x for x in linked if machine.index(x.name) < at], entry.find("ports"), "a finer level"),
    ]
    layers = [layer.name for layer in machine.memory if layer.scopes]
    if net.reaches not in layers:
        expected = f"expected a memory layer that has `scopes`: {', '.join(layers)}"
        found.append(entry.find("reaches").problem(expected))
    yield from found or _links(machine, net, entry)
    if net.link_bandwidth > net.bandwidth:
        yield entry.find("link_bandwidth").problem("more than the unit's `bandwidth` over all its links")
    yield from _mechanisms(net, entry.find("mechanisms"))


def _mechanisms(net: Network, entry: DocumentEntry) -> Iterator[MachineFileError]:
    if not net.mechanisms:
        yield entry.problem("expected at least one mechanism")
    for mechanism in net.mechanisms:
        here = entry.find(mechanism.name)
        offers = {operation: mechanism.rate(operation) for operation in OPERATIONS}
        if not any(offers.values()):
            yield here.problem("expected at least one of put, get, reduce")
        for operation, rate in offers.items():
            if rate and rate > net.bandwidth * (1 + 1e-9):
                yield here.find(operation).problem("more than the network's `bandwidth`, which is the peak")


def _links(machine: Description, net: Network, entry: DocumentEntry) -> Iterator[MachineFileError]:
    count = machine.count(net.level, net.within)
    if (net.topology in ("mesh", "torus")) != bool(net.dims):
        yield entry.find("dims").problem("a mesh or torus needs `dims`, and nothing else has them")
    elif net.dims and math.prod(net.dims) != count:
        shape = " x ".join(map(str, net.dims))
        yield entry.find("dims").problem(f"expected a product of {count}, the units it connects; {shape} is not")
    if (net.topology == "graph") != bool(net.links):
        yield entry.find("links").problem("a graph needs `links`, and nothing else has them")
    for position, link in enumerate(net.links):
        if not all(0 <= unit < count for unit in link.between) or link.between[0] == link.between[1]:
            yield entry.find("links").value[position].problem(f"expected two different units from 0 to {count - 1}")
    if net.ports and net.topology != "switch":
        yield entry.find("ports").problem("only a switch has ports of finer units")
