# SPDX-License-Identifier: MIT
"""Pages of measured times have the tables of the committed results; `UPDATE_DOCS=1` with these tests writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.figures import model_tables, tables
from tests.page_tables import compare_tables

DOCS = Path(__file__).parents[1] / "docs"
MADE = {
    "../README": {"operators": tables.first_screen},
    "index": {"operators": tables.first_screen},
    "how-fast": {"operators": tables.operators},
    "in-a-model": {
        "layers": model_tables.llama_layers,
        "layers in graphs": model_tables.llama_graphs,
        "decode": model_tables.decode,
        "dense layers": model_tables.dense_layers,
        "expert layers": model_tables.expert_layers,
        "memory": model_tables.memory,
    },
    "one-launch": {"simulated layers": tables.simulated_layers},
    "operators/experts": {"experts": tables.experts, "float8 experts": tables.float8_experts},
    "operators/float8": {"float8 collectives": tables.float8_collectives},
    "notes/measured-races": {"races": tables.races},
    "notes/host-time": {"eager collectives": tables.eager_collectives},
    "notes/gemm-experiments": {"forms": tables.forms},
    "notes/random-shapes": {"random shapes": tables.random_shapes},
}
"""Page -> marker -> its table."""


@pytest.mark.parametrize("page", MADE)
def test_tables_are_those_of_the_results(page: str):
    made: dict[str, Callable[[], str]] = MADE[page]
    compare_tables(DOCS / f"{page}.md", {marker: make() for marker, make in made.items()})


@pytest.mark.parametrize(
    ("result", "work", "shape", "ours", "text"),
    [
        (
            "models",
            "llama3_8b training_step",
            [1, 4096, 4096, 4],
            "tilescale, compiled",
            "takes {:.1f} ms on two H200 (PyTorch, compiled: {:.1f}, in CUDA graphs: {:.1f})",
        ),
        (
            "models",
            "llama3_8b decode",
            [1, 1, 4096, 4],
            "tilescale, compiled",
            "decode step {:.0f} us ({:.0f})",
        ),
        (
            "persistent",
            "llama decode 4 layers",
            [1, 1024, 4096],
            "one launch",
            "four such layers take {:.0f} us ({:.0f}, in another run)",
        ),
    ],
)
def test_models_of_the_first_screen(result: str, work: str, shape: list[int], ours: str, text: str):
    """The times on two GPUs, compared with layers compiled by PyTorch."""
    bfloat16 = [row for row in rows_of(result) if (row["dtype"], row.get("gpus", 2)) == ("bfloat16", 2)]
    # Rows of a decode step come first in CUDA graphs, then eagerly.
    times = {row["contender"]: row["us"] for row in bfloat16[::-1] if (row["work"], row["shape"]) == (work, shape)}
    scale = 1000 if " ms " in text else 1
    contenders = ours, "torch, compiled", "torch, CUDA graphs"
    wanted = text.format(*(times[each] / scale for each in contenders if each in times))
    assert wanted in page("../README")


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((DOCS.parent / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["rows"]


def page(name: str) -> str:
    """A page's words, in one line."""
    return " ".join((DOCS / f"{name}.md").read_text(encoding="utf-8").split())
