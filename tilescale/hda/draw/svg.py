# SPDX-License-Identifier: MIT
"""A machine as an SVG drawing: nested boxes from the whole to its thread groups, memory as bars, networks below the
units that they link; units of a mesh at their positions. Light or dark as the reader's system is.

One unit of each level is drawn in full and a few as strips next to it; a badge says how many there really are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations

from tilescale.hda.description import Description
from tilescale.hda.draw import mesh, words
from tilescale.hda.draw.palette import paint, style_sheet
from tilescale.hda.model import Level, MemoryLayer, Network
from tilescale.hda.units import format_bytes

PAD, GAP, TITLE, BAR, GROUP = 16, 10, 26, 26, 22
SIBLING, SIBLINGS = 46, 3
BAR_WIDTH, CHARACTER, SHIFT = 260, 6.7, 14
DEEPEST = 3
"""Number of colours of nested boxes."""


@dataclass(frozen=True)
class _DrawnBox:
    """A drawn piece with its size.

    Attributes:
        parts: SVG elements relative to its upper left corner.
        taps: where networks below it are wired to it.
    """

    width: float
    height: float
    parts: str
    taps: tuple[float, ...] = ()

    def at(self, x: float, y: float) -> str:
        """The piece with its upper left corner there."""
        return f'<g transform="translate({x:g},{y:g})">{self.parts}</g>'


def picture(machine: Description) -> str:
    """The drawing as the text of an SVG file."""
    outermost = _level(machine, len(machine.levels) - 1, depth=0)
    networks = [net for net in machine.networks if net.within is None]
    row = _units(machine, machine.levels[-1], outermost, within=None)
    body = _stack([row, *_networks(networks, row)], GAP)
    facts = _stack([_text(f"{unit}: {text}", 12, "soft") for unit, text in _arithmetic(machine)], 3)
    head = _stack([_text(machine.name, 22, "ink", bold=True), _text(machine.title, 14, "soft")], 6)
    page = _stack([head, body, facts, _legend(machine)], PAD)
    width, height = page.width + 2 * PAD, page.height + 2 * PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" class="machine" '
        f'style="max-width: 100%; height: auto" font-family="Helvetica, Arial, sans-serif">'
        f"{style_sheet()}<title>{escape(machine.name)}: {escape(machine.title)}</title>"
        f'<rect width="{width:g}" height="{height:g}" {paint("paper")}/>{page.at(PAD, PAD)}</svg>\n'
    )


def _arithmetic(machine: Description) -> list[tuple[str, str]]:
    owner = machine.tensor_level.name
    return [(f"{unit}, one {owner}", text) for unit, text in words.arithmetic(machine, owner)]


# -- boxes ---------------------------------------------------------------------------------------------------------


def _level(machine: Description, index: int, depth: int) -> _DrawnBox:
    """One unit of a level: its memory, the finer level inside, and the networks that link the units inside."""
    level = machine.levels[index]
    if level.kind == "thread_group":
        return _thread_groups(machine, index)
    inside: list[_DrawnBox] = [_bar(layer) for layer in reversed(machine.memory) if layer.level == level.name]
    if index:
        finer = machine.levels[index - 1]
        inner = _level(machine, index - 1, depth + 1)
        row = inner if finer.kind == "thread_group" else _units(machine, finer, inner, within=level.name)
        inside.append(row)
        inside += _networks([net for net in machine.networks if net.within == level.name], row)
    return _box(level, words.level_facts(machine, level), _stack(inside, GAP), depth)


def _box(level: Level, facts: str, inside: _DrawnBox, depth: int) -> _DrawnBox:
    title = _text(level.name + (f" - {level.title}" if level.title else ""), 14, "ink", bold=True)
    fact = _text(facts, 11, "soft")
    width = max(inside.width, title.width + (fact.width + GAP if facts else 0)) + 2 * PAD
    height = TITLE + inside.height + 2 * PAD
    dash = ' stroke-dasharray="6 4"' if level.kind == "cluster" else ""
    frame = (
        f'<rect width="{width:g}" height="{height:g}" rx="10" {paint(f"level{min(depth, DEEPEST)}", "edge")}{dash}/>'
    )
    right = fact.at(width - PAD - fact.width, PAD - 3) if facts else ""
    return _DrawnBox(width, height, frame + title.at(PAD, PAD - 6) + right + inside.at(PAD, PAD + TITLE))


def _units(machine: Description, level: Level, first: _DrawnBox, within: str | None) -> _DrawnBox:
    """All units of a level in one unit of the next coarser level, or in the machine, one of them in full."""
    nets = [net for net in machine.networks if (net.level, net.within) == (level.name, within)]
    flat = next((net for net in nets if len(net.dims) == 2), None)
    if flat is not None:
        return _plane(level, first, flat)
    number = machine.count(level.name, within)
    if level.kind != "cluster":
        return _siblings(level, first, number, f"\u00d7 {number}")
    # Clusters are made of programs that are there without them, some of which may be left over.
    program = machine.program_level.name
    return _siblings(level, first, number, f"{machine.count(program, within)} {program}s")


def _siblings(level: Level, first: _DrawnBox, number: int, badge: str) -> _DrawnBox:
    """A unit in full, up to `SIBLINGS` more as strips, and how many there are."""
    parts, taps, x = [first.at(0, 0)], [first.width / 2], first.width + GAP
    if number == 1:
        return _DrawnBox(first.width, first.height, first.parts, tuple(taps))
    for i in range(1, min(number, SIBLINGS + 1)):
        last = i == SIBLINGS and number > SIBLINGS + 1
        if last:
            parts.append(_centred("...", x + 12, first.height / 2))
            x += 24 + GAP
        parts.append(_strip(level, number - 1 if last else i, x, first.height))
        taps.append(x + SIBLING / 2)
        x += SIBLING + GAP
    label = _text(badge, 18, "ink", bold=True)
    parts.append(_centred(badge, x + label.width / 2, first.height / 2))
    return _DrawnBox(x + label.width, first.height, "".join(parts), tuple(taps))


def _strip(level: Level, number: int, x: float, height: float) -> str:
    dash = ' stroke-dasharray="6 4"' if level.kind == "cluster" else ""
    return (
        f'<rect x="{x:g}" width="{SIBLING}" height="{height:g}" rx="8" {paint(f"level{DEEPEST}", "edge")}{dash}/>'
        f'<text transform="translate({x + SIBLING / 2 + 4:g},{height / 2:g}) rotate(-90)" text-anchor="middle" '
        f'font-size="12" {paint("ink")}>{escape(f"{level.name} {number}")}</text>'
    )


def _plane(level: Level, first: _DrawnBox, net: Network) -> _DrawnBox:
    """Units at their positions on a mesh or torus; the first of them is drawn next to it in full."""
    width, height, drawn = mesh.cells(net.dims, net.topology == "torus")
    rows, columns = net.dims
    label = _text(f"{words.shape(net)} of {level.name}s", 14, "ink", bold=True)
    note = _text(f"{rows} rows, {columns} columns; the marked one in full", 11, "soft")
    field = _stack([_DrawnBox(width, height, drawn), label, note], GAP / 2)
    x = first.width + 4 * GAP
    pointer = (
        f'<path d="M {first.width:g} {mesh.STEP / 2:g} H {x + mesh.STEP / 2:g}" fill="none" {paint(stroke="wire")} '
        f'stroke-dasharray="2 3"/>'
    )
    parts = first.at(0, 0) + pointer + field.at(x, 0)
    return _DrawnBox(x + field.width, max(first.height, field.height), parts, (first.width / 2, x + width / 2))


def _thread_groups(machine: Description, index: int) -> _DrawnBox:
    """All levels of thread groups as nested pills, coarsest outside."""
    groups = machine.levels[: index + 1]
    pills = _DrawnBox(0, 0, "")
    for position, level in enumerate(groups):
        coarser = machine.levels[position + 1]
        number = machine.count(level.name, coarser.name)
        facts = words.level_facts(machine, level)
        most = "up to " if coarser.kind == "program" and number > 1 else ""
        text = _text(f"{most}{number} \u00d7 {level.name}" + (f", {facts}" if facts else ""), 12, "ink")
        width = max(text.width, pills.width) + 2 * GAP
        height = GROUP + (pills.height + GAP if pills.height else 0)
        frame = f'<rect width="{width:g}" height="{height:g}" rx="6" {paint("thread_group", "edge")}/>'
        pills = _DrawnBox(width, height, frame + text.at(GAP, 4) + pills.at(GAP, GROUP))
    return pills


# -- memory and networks ---------------------------------------------------------------------------------------------


def _bar(layer: MemoryLayer) -> _DrawnBox:
    """A memory layer; the filled part grows with the logarithm of its capacity, from 1 KiB to 4 TiB."""
    filled = BAR_WIDTH * min(1.0, max(0.06, (math.log2(layer.capacity) - 10) / 32))
    name = _text(f"{layer.name} {layer.title}".strip(), 12, "ink", bold=True)
    size = _text(format_bytes(layer.capacity), 12, "ink")
    facts = _text(words.layer_facts(layer).removeprefix(f"{format_bytes(layer.capacity)}, "), 11, "soft")
    parts = (
        f'<rect width="{BAR_WIDTH}" height="{BAR}" rx="4" {paint("bar", "edge")}/>'
        f'<rect width="{filled:g}" height="{BAR}" rx="4" {paint(layer.scope or "other")}/>'
        + name.at(8, 6)
        + size.at(BAR_WIDTH - size.width - 8, 6)
        + facts.at(BAR_WIDTH + 12, 7)
    )
    return _DrawnBox(BAR_WIDTH + 12 + facts.width, BAR, parts)


def _networks(networks: Sequence[Network], row: _DrawnBox) -> list[_DrawnBox]:
    """A strip for each network under the units it links; links of different networks are side by side."""
    shifts = [(i - (len(networks) - 1) / 2) * SHIFT for i in range(len(networks))]
    return [
        _network(net, row.width, [x + shift for x in row.taps]) for net, shift in zip(networks, shifts, strict=True)
    ]


def _network(net: Network, width: float, taps: Sequence[float]) -> _DrawnBox:
    title = f"{net.name}{f' - {net.title}' if net.title else ''}"
    first = _text(title, 13, "wire", bold=True)
    second = _text(f"connects {words.network_place(net)}: {words.network_facts(net)}", 11, "ink")
    mechanisms = [_text(f"{m.name}: {words.mechanism_facts(m)}", 11, "soft") for m in net.mechanisms]
    extra = [_text(", ".join(net.capabilities), 11, "soft")] if net.capabilities else []
    words_block = _stack([first, second, *mechanisms, *extra], 4)
    height = max(words_block.height, GLYPH) + 2 * 8
    width = max(width, words_block.width + GLYPH + 3 * PAD)
    colour = f'{paint(stroke="wire")} stroke-width="2"'
    wires = "".join(f'<line x1="{x:g}" y1="{-GAP}" x2="{x:g}" y2="0" {colour}/>' for x in taps)
    frame = f'<rect width="{width:g}" height="{height:g}" rx="8" {paint("network", "wire")}/>'
    drawing = f'<g transform="translate({PAD},{(height - GLYPH) / 2:g})">{glyph(net)}</g>'
    return _DrawnBox(width, height, wires + frame + drawing + words_block.at(GLYPH + 2 * PAD, 8))


def _legend(machine: Description) -> _DrawnBox:
    parts, x = "", 0.0
    for scopes in dict.fromkeys(layer.scopes for layer in machine.memory):
        label = _text(f"{', '.join(scopes) or 'other'} memory", 11, "soft")
        fill = paint(scopes[0] if scopes else "other")
        parts += f'<rect x="{x:g}" width="14" height="14" rx="3" {fill}/>{label.at(x + 20, 0)}'
        x += label.width + 44
    note = _text("bars: capacity, logarithmic from 1 KiB to 4 TiB", 11, "soft")
    return _DrawnBox(x + note.width, 16, parts + note.at(x, 0))


# -- helpers -----------------------------------------------------------------------------------------------------------


def _stack(blocks: Sequence[_DrawnBox], gap: float) -> _DrawnBox:
    parts, y, width = "", 0.0, 0.0
    for block in blocks:
        parts += block.at(0, y)
        y += block.height + gap
        width = max(width, block.width)
    return _DrawnBox(width, max(0.0, y - gap), parts)


def _text(text: str, size: int, fill: str, bold: bool = False) -> _DrawnBox:
    weight = ' font-weight="bold"' if bold else ""
    element = f'<text y="{size:g}" font-size="{size}" {paint(fill)}{weight}>{escape(text)}</text>'
    return _DrawnBox(len(text) * CHARACTER * size / 12 * (1.06 if bold else 1.0), size + 3, element)


def _centred(text: str, x: float, y: float) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" dominant-baseline="middle" font-size="18" '
        f'font-weight="bold" {paint("ink")}>{escape(text)}</text>'
    )


GLYPH = 44
"""Width and height of a glyph in pixels."""

Point = tuple[float, float]


def glyph(net: Network) -> str:
    """SVG elements that show how the units of the network are linked, `GLYPH` wide and high."""
    if net.topology in ("mesh", "torus"):
        return _grid(net.topology == "torus")
    points = _circle(8 if net.topology == "ring" else 6)
    if net.topology == "switch":
        centre = (GLYPH / 2, GLYPH / 2)
        box = f'<rect x="{GLYPH / 2 - 6}" y="{GLYPH / 2 - 6}" width="12" height="12" rx="2" {paint("wire")}/>'
        return _lines((point, centre) for point in points) + box + _dots(points)
    if net.topology == "ring":
        links: Iterable[tuple[Point, Point]] = zip(points, points[1:] + points[:1], strict=True)
    elif net.topology == "point-to-point":
        links = combinations(points, 2)
    else:
        links = [(points[i], points[j]) for i, j in ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5))]
    return _lines(links) + _dots(points)


def _circle(count: int) -> list[Point]:
    middle, radius = GLYPH / 2, GLYPH / 2 - 4
    angles = [2 * math.pi * i / count - math.pi / 2 for i in range(count)]
    return [(middle + radius * math.cos(angle), middle + radius * math.sin(angle)) for angle in angles]


def _grid(wraps: bool) -> str:
    at = [4 + i * (GLYPH - 8) / 3 for i in range(4)]
    # A line that leaves the grid stands for the links around a torus.
    start, end = (0.0, float(GLYPH)) if wraps else (at[0], at[-1])
    links = [((x, start), (x, end)) for x in at] + [((start, y), (end, y)) for y in at]
    return _lines(links) + _dots([(x, y) for x in at for y in at])


def _lines(links: Iterable[tuple[Point, Point]]) -> str:
    wire = paint(stroke="wire")
    return "".join(
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {wire}/>' for a, b in links
    )


def _dots(points: Iterable[Point]) -> str:
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {paint("wire")}/>' for x, y in points)
