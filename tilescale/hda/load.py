# SPDX-License-Identifier: MIT
"""From the name or file of a description to a `Machine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from os import PathLike, fspath
from os.path import isfile
from pathlib import Path

from tilescale.errors import MachineFileError, UnknownMachineError, check_type, did_you_mean
from tilescale.hda import topology, units
from tilescale.hda.document import BUILT_IN, DocumentEntry, merge, read
from tilescale.hda.machine import Machine
from tilescale.hda.model import Network
from tilescale.hda.reader import Reader
from tilescale.hda.validate import check


@cache
def names() -> tuple[str, ...]:
    """See `Machine.names`."""
    return tuple(sorted(path.stem for path in BUILT_IN.glob("*.yaml")))


def load(name_or_path: str | PathLike[str]) -> Machine:
    """See `Machine.load`."""
    check_type("machine", name_or_path, "a machine, a built-in name or a path", str, PathLike)
    given = fspath(name_or_path)
    path = _locate(given, Path.cwd())
    if path is None:
        raise UnknownMachineError(
            f"no machine {given!r}: neither a built-in name nor a file",
            hint=f"{did_you_mean(given, names(), 0.4)}the built-in machines are {', '.join(names())}",
        )
    return _built_in(path) if path.parent == BUILT_IN else _load(path)


@cache
def _built_in(path: Path) -> Machine:
    return _load(path)


def _locate(name: str, folder: Path) -> Path | None:
    if name in names():
        return BUILT_IN / f"{name}.yaml"
    path = folder / name
    return path if isfile(path) else None  # also of a name that is too long for one


def derive(base: str, name: str, changes: Mapping[str, object]) -> Machine:
    """The built-in machine `base` under another name with fields changed, as a description that extends it would.

    Args:
        base: a built-in name.
        name: the new machine's.
        changes: nested fields as in a description; None removes a section.
    """
    document = merge(read(BUILT_IN / f"{base}.yaml", _locate), DocumentEntry.of(changes, f"<{name}>"))
    return _from_document(document, name, "")


def _load(path: Path) -> Machine:
    return _from_document(read(path, _locate), path.stem, str(path))


def _from_document(document: DocumentEntry, name: str, file: str) -> Machine:
    reader = Reader(_program_clock(document))
    machine = reader.section(Machine, document, name=name, file=file)
    problems = reader.problems or list(check(machine, document))
    if problems:
        raise _together(problems)
    networks = tuple(_with_link_bandwidth(machine, net) for net in machine.networks)
    # A description that extends another lists its own layers last, at any level.
    memory = tuple(sorted(machine.memory, key=lambda layer: machine.index(layer.level)))
    return replace(machine, networks=networks, memory=memory)


def _program_clock(document: DocumentEntry) -> float | None:
    """The clock that per-clock quantities refer to; read first, since they may precede it."""
    levels = document.find("levels").value
    for level in levels.values() if isinstance(levels, dict) else ():
        if level.find("kind").value == "program":
            try:
                return units.parse(level.find("clock").value, "clock")
            except ValueError:
                return None  # missing, or reported where the field itself is read
    return None


def _with_link_bandwidth(machine: Machine, net: Network) -> Network:
    """The network with its bandwidth split evenly over the links where the description names no bandwidth of a link."""
    if net.link_bandwidth:
        return net
    count = machine.count(net.level, net.within)
    links = machine.count(net.ports, net.level) if net.ports else topology.link_count(net, count)
    return replace(net, link_bandwidth=net.bandwidth / links)


def _together(problems: list[MachineFileError]) -> MachineFileError:
    if len(problems) == 1:
        return problems[0]
    return MachineFileError(
        "\n".join(f"{problem.message}{f' ({problem.hint})' if problem.hint else ''}" for problem in problems),
        where=[place for problem in problems for place in problem.where],
    )
