# SPDX-License-Identifier: MIT
"""Ranks of a job that compare sums, and what an engine asks of its all-reduce."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import tilescale

WORLD = tilescale.init()


def members() -> tuple[dist.ProcessGroup, torch.Tensor, torch.Tensor]:
    """A group of all ranks, a tensor of this one, and the sum of all, in float64."""
    dist.init_process_group("gloo")
    given = [torch.randn(6, 64, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(WORLD.size)]
    return dist.new_group(list(range(WORLD.size))), given[WORLD.rank], torch.stack([x.double() for x in given]).sum(0)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def check_signatures(ours: type, theirs: type) -> set[str]:
    """Methods of both classes; TileScale's must accept the arguments of theirs."""
    shared = {name for name, x in vars(theirs).items() if inspect.isfunction(x) and hasattr(ours, name)}
    for name in shared:
        given = list(inspect.signature(getattr(theirs, name)).parameters.values())
        required = [each for each in given if each.default is each.empty]
        inspect.signature(getattr(ours, name)).bind(*required, **{each.name: each for each in given[len(required) :]})
    return shared


def check_uses(made: object, *sources: Path) -> set[str]:
    """Attributes of `.ca_comm` that files use, all of which it has; calls fit its methods."""
    asked = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for name, call in _uses(ast.parse(text)) if "ca_comm" in text else ():
            if f'"{name}")' in text:  # hasattr
                continue
            asked.add(name)
            value = getattr(made, name)
            if call is not None:
                inspect.signature(value).bind(*call.args, **{each.arg: each for each in call.keywords if each.arg})
    return asked


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.Call | None]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = list(ast.walk(function))
        calls = {id(node.func): node for node in inside if isinstance(node, ast.Call)}
        stores = [node for node in inside if isinstance(node, ast.Assign) and _is_slot(node.value)]
        names = {target.id for node in stores for target in node.targets if isinstance(target, ast.Name)}
        for node in inside:
            if isinstance(node, ast.Attribute):
                named = isinstance(node.value, ast.Name) and node.value.id in names
                if named or _is_slot(node.value):
                    yield node.attr, calls.get(id(node))


def _is_slot(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        return ast.unparse(node.args[1]) == "'ca_comm'"
    return isinstance(node, ast.Attribute) and node.attr == "ca_comm"
