# SPDX-License-Identifier: MIT
"""Pages of measured times have the tables of the committed results; `UPDATE_DOCS=1` with these tests writes them."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.figures import distributions, model_tables, tables
from docs.figures.charts import measured
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
        "new lengths": model_tables.new_lengths,
        "dense layers": model_tables.dense_layers,
        "expert layers": model_tables.expert_layers,
        "memory": model_tables.memory,
    },
    "one-launch": {"simulated layers": tables.simulated_layers},
    "operators/experts": {"experts": tables.experts, "float8 experts": tables.float8_experts},
    "operators/float8": {"float8 collectives": tables.float8_collectives},
    "notes/measured-races": {"races": tables.races},
    "notes/host-time": {"eager collectives": tables.eager_collectives, "host times": tables.host_times},
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
    bfloat16 = [row for row in measured(result)["rows"] if (row["dtype"], row.get("gpus", 2)) == ("bfloat16", 2)]
    # Rows of a decode step come first in CUDA graphs, then eagerly.
    times = {row["contender"]: row["us"] for row in bfloat16[::-1] if (row["work"], row["shape"]) == (work, shape)}
    scale = 1000 if " ms " in text else 1
    contenders = ours, "torch, compiled", "torch, CUDA graphs"
    wanted = text.format(*(times[each] / scale for each in contenders if each in times))
    assert wanted in page("../README")


def test_sentences_on_random_shapes():
    """Medians over each other contender, races lost to the faster one, and by how much."""
    medians = []
    for name in distributions.OTHERS:
        found = distributions.ratios([name])
        for mode in ("eager", "graph"):
            medians.append(statistics.median(x for key, each in found.items() if key[2] == mode for x in each))
    every = [ratio for each in distributions.ratios().values() for ratio in each]
    lost = sum(ratio > distributions.NEAR for ratio in every)
    text, nccl, symm_mem = page("how-fast"), medians[:2], medians[2:]
    assert "the medians are {:.2f} eagerly and {:.2f} in graphs".format(*nccl) in text
    assert "over `symm_mem` {:.2f} and {:.2f}".format(*symm_mem) in text
    assert f"{lost} of {len(every)} [races](notes/random-shapes.md)" in text and f"up to {max(every):.2f};" in text
    assert f"{lost} of {len(every)} races are lost to the faster one" in page("notes/random-shapes")


def test_sentences_on_eager_collectives():
    """The range of the ratios to NCCL up to 4 MiB, where the host is the limit, and the largest of all sizes."""
    ratios = {
        (row["work"], 2 * row["shape"][0] * row["shape"][1]): row["ratio"]
        for row in measured("new_results")["rows"]
        if (row["mode"], row["contender"]) == ("eager", "tilescale")
    }
    small = [ratio for (_, size), ratio in ratios.items() if size <= 4 << 20]
    said = f"of up to 4 MiB takes {min(small):.2f} to {max(small):.2f} of NCCL's time"
    assert len(small) == 4 * 6 and said in page("how-fast")
    assert f"up to 64 MiB it takes at most {max(ratios.values()):.2f}" in page("how-fast")


def test_targets_of_decode_and_few_rows():
    """Time over half of one GPU's, and over the best of NCCL and symm_mem from 1 to 256 rows."""
    rows = measured("operators")["rows"]

    def times(work: str, first: int) -> dict[str, float]:
        form = work, first, "graph"
        return {r["contender"]: r["us"] for r in rows if (r["work"], r["shape"][0], r["mode"]) == form}

    decode = times("mla_decode", 4)
    assert f"of half of one GPU's time | {2 * decode['tilescale'] / decode['one GPU']:.2f} |" in page("how-fast")
    ratios = []
    for few in (1, 16, 128, 256):
        of = times("gemm_ar", few)
        ratios.append(of["tilescale"] / min(us for name, us in of.items() if name.startswith(("nccl", "symm_mem"))))
    assert f"From 1 to 256 rows a GEMM and all-reduce takes {min(ratios):.2f} to {max(ratios):.2f}" in page("how-fast")


def page(name: str) -> str:
    """A page's words, in one line."""
    return " ".join((DOCS / f"{name}.md").read_text(encoding="utf-8").split())
