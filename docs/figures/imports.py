# SPDX-License-Identifier: MIT
"""The layers of the source, from its import statements."""

from __future__ import annotations

import re
from pathlib import Path

import networkx

from docs.figures.style import Figure

ROOT = Path(__file__).parents[2]
SEAM = "tilelang_core"
IMPORT = re.compile(r"^ *(?:from|import) (?:(tilelang_core)|tilescale\.(\w+)|tilescale import (\w+))", re.MULTILINE)

WIDTH, ROW, HEIGHT = 460, 50, 28
"""Of the figure, from a row of boxes to the next one, and of a box, in pixels."""

LANES = (6, WIDTH - 6)
"""Positions of the vertical lines for imports that skip a row."""


def layers() -> Figure:
    """A row for each layer: parts that import each other share a box, arrows leave out what other arrows imply."""
    graph = networkx.transitive_reduction(parts := networkx.condensation(imports()))
    names = {box: ", ".join(sorted(parts.nodes[box]["members"])) for box in parts}
    rows = [sorted(row, key=names.__getitem__) for row in networkx.topological_generations(graph)]
    level = {box: number for number, row in enumerate(rows) for box in row}
    lanes = _lanes([edge for edge in graph.edges if level[edge[1]] > level[edge[0]] + 1], level)
    sides = {box: 2 * lane - 1 for edge, lane in lanes.items() for box in edge}
    figure = Figure("Parts of TileScale: an arrow goes from a part to one that it imports", WIDTH, ROW * len(rows))
    at = {}
    for number, row in enumerate(rows):
        for place, box in enumerate(sorted(row, key=lambda box: (sides.get(box, 0), names[box]))):
            width = 22 + 6.8 * len(names[box])
            centre = WIDTH / 2 + (place - (len(row) - 1) / 2) * 112
            at[box] = centre - width / 2, centre + width / 2, ROW * number + 8
            figure.box(at[box][0], at[box][2], width, HEIGHT, "unit", names[box])
    for source, target in graph.edges:
        (left, right, top), (first, last, low) = at[source], at[target]
        if (source, target) in lanes:
            lane = lanes[source, target]
            x, begin, end = LANES[lane], (left, right)[lane], (first, last)[lane]
            high, deep = top + HEIGHT / 2, low + HEIGHT / 2
            figure.arrow((begin, high), (x, high), (x, deep), (end, deep))
        else:
            figure.arrow(((left + right) / 2, top + HEIGHT), ((first + last) / 2, low))
    return figure


def imports() -> networkx.DiGraph:
    """Part -> the parts that any of its files imports."""
    folder, graph = ROOT / "tilescale", networkx.DiGraph()
    parts = {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    for path in sorted([*folder.rglob("*.py"), *(ROOT / SEAM).rglob("*.py")]):
        mine = SEAM if ROOT / SEAM in path.parents else path.relative_to(folder).parts[0].removesuffix(".py")
        found = {next(filter(None, names)) for names in IMPORT.findall(path.read_text(encoding="utf-8"))}
        graph.add_edges_from((mine, other) for other in sorted(found & {SEAM, *parts}) if other != mine)
    graph.remove_node("__init__")
    return graph


def _lanes(edges: list[tuple[int, int]], level: dict[int, int]) -> dict[tuple[int, int], int]:
    """Edge -> 0 for the left lane, or 1 for the right one where the left one is taken."""
    lanes, free = {}, 0
    for edge in sorted(edges, key=lambda edge: (level[edge[0]], level[edge[1]])):
        lanes[edge] = int(level[edge[0]] < free)
        free = free if lanes[edge] else level[edge[1]]
    return lanes
