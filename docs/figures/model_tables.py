# SPDX-License-Identifier: MIT
"""Tables of layers of models in Markdown, from the committed results of `benchmarks/models.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from docs.figures.charts import Row, measured
from docs.figures.tables import table

Columns = Sequence[tuple[str, str]]
"""The head of each column, and its contender."""

Work = tuple[str, str, int, int]
"""The label of a row, the name of a work, sequences and their tokens."""

PLAN, OURS = ("PyTorch's tensor parallelism", "torch"), ("TileScale", "tilescale")
COMPILED = "compiled", "torch, compiled"

DENSE = PLAN, COMPILED, ("compiled, async TP", "torch, async TP"), OURS, ("TileScale, compiled", "tilescale, compiled")
IN_GRAPHS = (PLAN[0], "torch, CUDA graphs"), (OURS[0], "tilescale, CUDA graphs")
WITH_EXPERTS = (
    PLAN,
    COMPILED,
    OURS,
    ("compiled", "tilescale, compiled"),
    ("compiled, CUDA graphs", "tilescale, CUDA graphs"),
)
OF_DECODE = PLAN, OURS, ("PyTorch, compiled", "torch, compiled"), ("TileScale, compiled", "tilescale, compiled")

STEP, FORWARD = "training_step", "prefill"

LLAMA: list[Work] = [
    ("training step with AdamW, 1 x 4096 tokens", f"llama3_8b {STEP}", 1, 4096),
    ("training step with AdamW, 4 x 1024 tokens", f"llama3_8b {STEP}", 4, 1024),
    ("forward without gradients, 4096 tokens", f"llama3_8b {FORWARD}", 1, 4096),
    ("forward without gradients, 3001 tokens", f"llama3_8b {FORWARD}", 1, 3001),
]

TRAINED: list[Work] = [
    ("Llama 3 8B, 1 x 4096 tokens", f"llama3_8b {STEP}", 1, 4096),
    ("Llama 3 8B, 4 x 1024 tokens", f"llama3_8b {STEP}", 4, 1024),
    ("Qwen3 14B", f"qwen3_14b {STEP}", 1, 4096),
    ("Gemma 3 27B", f"gemma3_27b {STEP}", 1, 4096),
    ("Mixtral 8x7B", f"mixtral_8x7b {STEP}", 1, 4096),
    ("Qwen3 30B A3B", f"qwen3_30b_a3b {STEP}", 1, 4096),
]

WAYS = {
    "eager": "",
    "compiled": ", compiled",
    "compiled, async TP": ", async TP",
    "compiled, CUDA graphs": ", CUDA graphs",
}
"""How layers are run, and the end of the contender's name."""


def llama_layers() -> str:
    """Layers of Llama 3 8B, eager and compiled."""
    return _works(LLAMA, DENSE)


def llama_graphs() -> str:
    """Layers of Llama 3 8B, compiled with CUDA graphs."""
    return _works(LLAMA, IN_GRAPHS)


def new_lengths() -> str:
    """Prefills of a new length by all layers of Llama 3 8B."""
    works = [("Llama 3 8B, 128 to 2047 tokens", f"llama3_8b {FORWARD} of a new length", 1, 2048)]
    return _works(works, (PLAN, COMPILED, OURS, DENSE[-1]))


def dense_layers() -> str:
    """Layers of other models."""
    works = [
        ("Qwen3 14B, training step", f"qwen3_14b {STEP}", 1, 4096),
        ("Qwen3 14B, forward", f"qwen3_14b {FORWARD}", 1, 4096),
        ("Gemma 3 27B, training step", f"gemma3_27b {STEP}", 1, 4096),
    ]
    return _works(works, DENSE)


def expert_layers() -> str:
    """Layers of models with experts."""
    works = [
        (f"{label}, {kind}", f"{family} {work}", 1, 4096)
        for label, family in (("Mixtral 8x7B", "mixtral_8x7b"), ("Qwen3 30B A3B", "qwen3_30b_a3b"))
        for kind, work in (("training step", STEP), ("forward", FORWARD))
    ]
    return _works(works, WITH_EXPERTS, missing="refused")


def decode() -> str:
    """Steps of decode: microseconds in a CUDA graph, milliseconds eagerly."""
    lines = []
    for batch, mode in ((1, "graph"), (4, "graph"), (16, "graph"), (1, "eager")):
        of = _rows("llama3_8b decode", batch, 1, mode)
        cells = [_time(of[name], "us" if mode == "graph" else "ms") for _, name in OF_DECODE]
        ratios = (of[f"tilescale{end}"]["us"] / of[f"torch{end}"]["us"] for end in ("", ", compiled"))
        label = f"{batch}" if mode == "graph" else f"{batch}, {mode}"
        lines.append([label, *cells, ", ".join(f"{ratio:.2f}" for ratio in ratios)])
    return table(["sequences", *(head for head, _ in OF_DECODE), "ratios"], lines, 0)


def memory() -> str:
    """GiB of a rank at the peak of a training step: PyTorch's and TileScale's."""
    lines = []
    for label, *work in TRAINED:
        of = _rows(*work)
        peaks = ([of.get(f"{side}{end}", {}).get("gib") for side in ("torch", "tilescale")] for end in WAYS.values())
        lines.append([label, *(" / ".join("-" if gib is None else f"{gib:.2f}" for gib in pair) for pair in peaks)])
    return table(["", *WAYS], lines)


def _works(works: Iterable[Work], columns: Columns, missing: str = "") -> str:
    """Times, and the ratio of our best to PyTorch's best of these columns."""
    lines = []
    for label, *work in works:
        of = _rows(*work)
        cells = [_time(of[contender]) if contender in of else missing for _, contender in columns]
        ours, others = (
            min(of[each]["us"] for _, each in columns if each in of and each.startswith(side))
            for side in ("tilescale", "torch")
        )
        lines.append([label, *cells, f"{ours / others:.2f}"])
    return table(["work", *(head for head, _ in columns), "ratio"], lines)


def _rows(work: str, batch: int, tokens: int, mode: str = "eager") -> dict[str, Row]:
    """The rows of a work by contender."""
    key = work, [batch, tokens], mode
    found = (row for row in measured("models")["rows"] if (row["work"], row["shape"][:2], row["mode"]) == key)
    return {row["contender"]: row for row in found}


def _time(row: Row, unit: str = "ms") -> str:
    """The median, and the fastest and slowest round."""
    scale, digits = (1000, 1) if unit == "ms" else (1, 0)
    median, low, high = (f"{us / scale:.{digits}f}" for us in (row["us"], *row["spread"]))
    return f"{median} {unit} ({low} to {high})"
