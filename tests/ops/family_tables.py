# SPDX-License-Identifier: MIT
"""A table of Markdown: the linear layers of each family of models, parallelized by both plans."""

from __future__ import annotations

import warnings
from collections import defaultdict
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.ops.families import FAMILIES, PLANS, Family, block_of
from tilescale import ops
from tilescale.ops.dtensors import is_dtensor
from tilescale.ops.linear import ParallelLinear

PARTS = ("attention", "MLP", "experts")


def families(mesh: DeviceMesh) -> dict[str, str]:
    """Families whose parts become the same, by both plans."""
    rows = defaultdict(list)
    for name, family in FAMILIES.items():
        by_plan = [_parts(family, plan, mesh) for plan in PLANS]
        rows[tuple(_cell(*(parts.get(part) for parts in by_plan)) for part in PARTS)].append(f"`{name}`")
    cells = [[", ".join(names), *parts] for parts, names in sorted(rows.items(), key=lambda row: -len(row[1]))]
    heads = ["families", *PARTS]
    table = (heads, ["---"] * len(heads), *cells)
    return {"families": "\n".join("| " + " | ".join(row) + " |" for row in table)}


def _cell(*kinds: str | None) -> str:
    """The kind of a part by both plans, or by each."""
    if all(one == other for one, other in pairwise(kinds)):
        return kinds[0] or ""
    return "; ".join(f"{kind} ({plan})" for plan, kind in zip(PLANS, kinds, strict=True))


def _parts(family: Family, plan: str, mesh: DeviceMesh) -> dict[str, str]:
    """The linear layers of each part of a parallelised model."""
    model = family.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that become PyTorch's
        made: Any = ops.parallelize_module(model, mesh, getattr(family, plan)(model))
    found: dict[str, str] = {}
    for name, block in made.named_modules():
        layers = [each for each in block.modules() if isinstance(each, nn.Linear)]
        experts = [each for each, _ in block.named_children() if "experts" in each]
        if block_of(name) == name and (layers or experts):
            part = "experts" if experts else "attention" if "att" in name else "MLP"
            found[part] = _whole_experts(layers) if experts else _kind(layers)
    return found


def _whole_experts(shared: list[nn.Linear]) -> str:
    split = [each for each in shared if isinstance(each, ParallelLinear)]
    return f"whole; shared ones {_kind(split)}" if split else "whole"


def _kind(layers: list[nn.Linear]) -> str:
    if ours := [each for each in layers if isinstance(each, ParallelLinear)]:
        columns = [each for each in ours if isinstance(each, ops.ColumnParallelLinear)]
        rows_alone = any(each.sequence for each in ours) and not any(each.sequence for each in columns)
        return "TileScale, gather PyTorch" if rows_alone else "TileScale"
    return "PyTorch" if any(is_dtensor(each.weight) for each in layers) else "whole"
