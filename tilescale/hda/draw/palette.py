# SPDX-License-Identifier: MIT
"""Colours of drawings by their purpose, light and dark: classes of a style sheet inside the drawing."""

from __future__ import annotations

COLOURS = {
    "paper": ("#ffffff", "#131416"),
    "ink": ("#1f2a37", "#dde1e7"),
    "soft": ("#5b6776", "#9aa3af"),
    "edge": ("#7f95ad", "#5d6f84"),
    "wire": ("#8e44ad", "#c792e0"),
    "network": ("#f8f1fc", "#261a2e"),
    "thread_group": ("#fdfdfd", "#20242a"),
    "bar": ("#ffffff", "#1b1e23"),
    "level0": ("#f5f8fc", "#191d23"),
    "level1": ("#eaf1f9", "#1f262e"),
    "level2": ("#dfe9f5", "#26303a"),
    "level3": ("#d4e1f0", "#2d3946"),
    "fragment": ("#f4b183", "#8a4f25"),
    "shared": ("#ffd966", "#7d6314"),
    "global": ("#a9d18e", "#3f6b28"),
    "host": ("#c9c9c9", "#565b63"),
    "other": ("#d9c3e8", "#5f4473"),
}
"""Name -> the colour on light paper, and on dark paper."""


def paint(fill: str | None = None, stroke: str | None = None) -> str:
    """SVG attribute that fills, or strokes, an element in named colours."""
    names = [f"f-{fill}"] * (fill is not None) + [f"s-{stroke}"] * (stroke is not None)
    return f'class="{" ".join(names)}"'


def style_sheet() -> str:
    """The style of drawings of the class `machine`; dark where the reader's system asks for it."""
    light, dark = ("".join(_rules(name, pair[i]) for name, pair in COLOURS.items()) for i in (0, 1))
    return f"<style>{light}@media (prefers-color-scheme: dark) {{{dark}}}</style>"


def _rules(name: str, colour: str) -> str:
    return f".machine .f-{name} {{fill: {colour}}} .machine .s-{name} {{stroke: {colour}}} "
