# SPDX-License-Identifier: MIT
"""A machine as an SVG drawing: nested boxes from the whole to its lanes, memory as bars, networks below what they link.

Of each level one unit is drawn in full and a few as strips beside it; a badge says how many there really are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilescale.hda.draw import words
from tilescale.hda.draw.glyphs import GLYPH, glyph
from tilescale.hda.machine import Machine
from tilescale.hda.model import Level, MemoryLayer, Network
from tilescale.hda.units import format_bytes

__all__ = ["picture"]

PAD, GAP, TITLE, BAR, LANE = 16, 10, 26, 26, 22
SIBLING, SIBLINGS = 46, 3
BAR_WIDTH, CHARACTER, SHIFT = 260, 6.7, 14
LEVEL_FILLS = ("#ffffff", "#f5f8fc", "#eaf1f9", "#dfe9f5", "#d4e1f0")
SCOPE_FILLS = {"fragment": "#f4b183", "shared": "#ffd966", "global": "#a9d18e", "host": "#c9c9c9", "": "#d9c3e8"}
INK, SOFT, WIRE = "#1f2a37", "#5b6776", "#8e44ad"


@dataclass(frozen=True)
class _Block:
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


def picture(machine: Machine) -> str:
    """The drawing as the text of an SVG file."""
    outermost = _level(machine, len(machine.levels) - 1, depth=0)
    networks = [net for net in machine.networks if net.within is None]
    row = _siblings(machine.levels[-1], outermost, machine.count(machine.levels[-1].name))
    body = _stack([row, *_networks(networks, row)], GAP)
    facts = _stack([_text(f"{unit}: {text}", 12, SOFT) for unit, text in _arithmetic(machine)], 3)
    head = _stack([_text(machine.name, 22, INK, bold=True), _text(machine.title, 14, SOFT)], 6)
    page = _stack([head, body, facts, _legend(machine)], PAD)
    width, height = page.width + 2 * PAD, page.height + 2 * PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif">'
        f"<title>{escape(machine.name)}: {escape(machine.title)}</title>"
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>{page.at(PAD, PAD)}</svg>\n'
    )


def _arithmetic(machine: Machine) -> list[tuple[str, str]]:
    owner = machine.tensor_level.name
    return [(f"{unit}, one {owner}", text) for unit, text in words.arithmetic(machine, owner)]


# -- boxes ---------------------------------------------------------------------------------------------------------


def _level(machine: Machine, index: int, depth: int) -> _Block:
    """One unit of a level: its memory, the finer level inside, and the networks that link the units inside."""
    level = machine.levels[index]
    if level.kind == "lanes":
        return _lanes(machine, index)
    inside: list[_Block] = [_bar(layer) for layer in reversed(machine.memory) if layer.level == level.name]
    if index:
        finer = machine.levels[index - 1]
        inner = _level(machine, index - 1, depth + 1)
        number = machine.count(finer.name, level.name)
        row = inner if finer.kind == "lanes" else _siblings(finer, inner, number)
        inside.append(row)
        inside += _networks([net for net in machine.networks if net.within == level.name], row)
    return _box(level, words.level_facts(machine, level), _stack(inside, GAP), depth)


def _box(level: Level, facts: str, inside: _Block, depth: int) -> _Block:
    title = _text(level.name + (f" - {level.title}" if level.title else ""), 14, INK, bold=True)
    fact = _text(facts, 11, SOFT)
    width = max(inside.width, title.width + (fact.width + GAP if facts else 0)) + 2 * PAD
    height = TITLE + inside.height + 2 * PAD
    dash = ' stroke-dasharray="6 4"' if level.kind == "cluster" else ""
    frame = (
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{LEVEL_FILLS[min(depth + 1, 4)]}" '
        f'stroke="#7f95ad"{dash}/>'
    )
    right = fact.at(width - PAD - fact.width, PAD - 3) if facts else ""
    return _Block(width, height, frame + title.at(PAD, PAD - 6) + right + inside.at(PAD, PAD + TITLE))


def _siblings(level: Level, first: _Block, number: int) -> _Block:
    """A unit in full, up to `SIBLINGS` more as strips, and how many there are."""
    parts, taps, x = [first.at(0, 0)], [first.width / 2], first.width + GAP
    if number == 1:
        return _Block(first.width, first.height, first.parts, tuple(taps))
    dash = ' stroke-dasharray="6 4"' if level.kind == "cluster" else ""
    for i in range(1, min(number, SIBLINGS + 1)):
        last = i == SIBLINGS and number > SIBLINGS + 1
        name = f"{level.name} {number - 1 if last else i}"
        if last:
            parts.append(_centred("...", x + 12, first.height / 2, 18))
            x += 24 + GAP
        parts.append(
            f'<rect x="{x:g}" width="{SIBLING}" height="{first.height:g}" rx="8" fill="{LEVEL_FILLS[4]}" '
            f'stroke="#7f95ad"{dash}/><text transform="translate({x + SIBLING / 2 + 4:g},{first.height / 2:g}) '
            f'rotate(-90)" text-anchor="middle" font-size="12" fill="{INK}">{escape(name)}</text>'
        )
        taps.append(x + SIBLING / 2)
        x += SIBLING + GAP
    badge = f"up to {number}" if level.kind == "cluster" else f"\u00d7 {number}"
    label = _text(badge, 18, INK, bold=True)
    parts.append(_centred(badge, x + label.width / 2, first.height / 2, 18))
    return _Block(x + label.width, first.height, "".join(parts), tuple(taps))


def _lanes(machine: Machine, index: int) -> _Block:
    """All lanes levels as nested pills, coarsest outside."""
    lanes = machine.levels[: index + 1]
    pills = _Block(0, 0, "")
    for position, level in enumerate(lanes):
        coarser = machine.levels[position + 1]
        number = machine.count(level.name, coarser.name)
        facts = words.level_facts(machine, level)
        most = "up to " if coarser.kind == "program" and number > 1 else ""
        text = _text(f"{most}{number} \u00d7 {level.name}" + (f", {facts}" if facts else ""), 12, INK)
        width = max(text.width, pills.width) + 2 * GAP
        height = LANE + (pills.height + GAP if pills.height else 0)
        frame = f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#fdfdfd" stroke="#b9c4d0"/>'
        pills = _Block(width, height, frame + text.at(GAP, 4) + pills.at(GAP, LANE))
    return pills


# -- memory and networks ---------------------------------------------------------------------------------------------


def _bar(layer: MemoryLayer) -> _Block:
    """A memory layer; the filled part grows with the logarithm of its capacity, from 1 KiB to 4 TiB."""
    filled = BAR_WIDTH * min(1.0, max(0.06, (math.log2(layer.capacity) - 10) / 32))
    name = _text(f"{layer.name} {layer.title}".strip(), 12, INK, bold=True)
    size = _text(format_bytes(layer.capacity), 12, INK)
    facts = _text(words.layer_facts(layer).removeprefix(f"{format_bytes(layer.capacity)}, "), 11, SOFT)
    parts = (
        f'<rect width="{BAR_WIDTH}" height="{BAR}" rx="4" fill="#ffffff" stroke="#c5ced8"/>'
        f'<rect width="{filled:g}" height="{BAR}" rx="4" fill="{SCOPE_FILLS[layer.scope]}"/>'
        + name.at(8, 6)
        + size.at(BAR_WIDTH - size.width - 8, 6)
        + facts.at(BAR_WIDTH + 12, 7)
    )
    return _Block(BAR_WIDTH + 12 + facts.width, BAR, parts)


def _networks(networks: Sequence[Network], row: _Block) -> list[_Block]:
    """A strip for each network under the units it links; wires of different networks stand side by side."""
    shifts = [(i - (len(networks) - 1) / 2) * SHIFT for i in range(len(networks))]
    return [
        _network(net, row.width, [x + shift for x in row.taps]) for net, shift in zip(networks, shifts, strict=True)
    ]


def _network(net: Network, width: float, taps: Sequence[float]) -> _Block:
    title = f"{net.name}{f' - {net.title}' if net.title else ''}"
    first = _text(title, 13, WIRE, bold=True)
    second = _text(f"connects {words.network_place(net)}: {words.network_facts(net)}", 11, INK)
    ways = [_text(f"{m.name}: {words.mechanism_facts(m)}", 11, SOFT) for m in net.mechanisms]
    extra = [_text(", ".join(net.capabilities), 11, SOFT)] if net.capabilities else []
    words_block = _stack([first, second, *ways, *extra], 4)
    height = max(words_block.height, GLYPH) + 2 * 8
    width = max(width, words_block.width + GLYPH + 3 * PAD)
    wires = "".join(f'<line x1="{x:g}" y1="{-GAP}" x2="{x:g}" y2="0" stroke="{WIRE}" stroke-width="2"/>' for x in taps)
    frame = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#f8f1fc" stroke="{WIRE}"/>'
    drawing = f'<g transform="translate({PAD},{(height - GLYPH) / 2:g})">{glyph(net, WIRE)}</g>'
    return _Block(width, height, wires + frame + drawing + words_block.at(GLYPH + 2 * PAD, 8))


def _legend(machine: Machine) -> _Block:
    parts, x = "", 0.0
    for scopes in dict.fromkeys(layer.scopes for layer in machine.memory):
        label = _text(f"{', '.join(scopes) or 'other'} memory", 11, SOFT)
        fill = SCOPE_FILLS[scopes[0] if scopes else ""]
        parts += f'<rect x="{x:g}" width="14" height="14" rx="3" fill="{fill}"/>{label.at(x + 20, 0)}'
        x += label.width + 44
    note = _text("bars: capacity, logarithmic from 1 KiB to 4 TiB", 11, SOFT)
    return _Block(x + note.width, 16, parts + note.at(x, 0))


# -- helpers -----------------------------------------------------------------------------------------------------------


def _stack(blocks: Sequence[_Block], gap: float) -> _Block:
    parts, y, width = "", 0.0, 0.0
    for block in blocks:
        parts += block.at(0, y)
        y += block.height + gap
        width = max(width, block.width)
    return _Block(width, max(0.0, y - gap), parts)


def _text(text: str, size: int, fill: str, bold: bool = False) -> _Block:
    weight = ' font-weight="bold"' if bold else ""
    element = f'<text y="{size:g}" font-size="{size}" fill="{fill}"{weight}>{escape(text)}</text>'
    return _Block(len(text) * CHARACTER * size / 12 * (1.06 if bold else 1.0), size + 3, element)


def _centred(text: str, x: float, y: float, size: int) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" dominant-baseline="middle" font-size="{size}" '
        f'font-weight="bold" fill="{INK}">{escape(text)}</text>'
    )
