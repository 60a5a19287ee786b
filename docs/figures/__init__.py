# SPDX-License-Identifier: MIT
"""The figures of the documentation, drawn in one style: `python -m docs.figures` writes them to `docs/diagrams`."""

from __future__ import annotations

from pathlib import Path

from docs.figures import accuracy, blocks, charts, concepts, distributions, imports, moves, products

FOLDER = Path(__file__).parents[1] / "diagrams"

EXAMPLES = {
    1: moves.neighbour_shift,
    2: moves.put_with_credit,
    3: moves.all_gather,
    4: moves.all_reduce,
    5: moves.all_to_all,
    6: products.ag_gemm,
    7: products.gemm_rs,
    8: products.tp_gemm,
    9: blocks.flash_mla,
    10: products.cluster_gemm,
    11: blocks.roles,
    12: blocks.sender_role,
    13: blocks.ring_attention,
    14: blocks.ulysses,
    15: products.gemm_all_reduce,
    16: products.cannon,
    17: products.summa,
    18: moves.mixture_of_experts,
    19: moves.two_nodes,
    20: moves.wafer_mesh,
    21: moves.stacked_dram,
    22: products.ag_gemm_overlapped,
    23: products.gemm_rs_overlapped,
    24: products.grouped_experts,
}
"""The number of an example -> the figure of its idea."""


def drawn() -> dict[str, str]:
    """The name of every file, and its text."""
    concept = {f"{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in concepts.FIGURES}
    measured = {f"{name}.svg": draw().svg() for name, draw in charts.FIGURES.items()}
    measured["layers.svg"] = imports.layers().svg()
    measured["any-shape.svg"] = distributions.any_shape().svg()
    measured["accuracy.svg"] = accuracy.accuracy().svg()
    return concept | measured | {f"example-{number:02}.svg": draw().svg() for number, draw in EXAMPLES.items()}
