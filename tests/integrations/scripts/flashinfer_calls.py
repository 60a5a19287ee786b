# SPDX-License-Identifier: MIT
"""FlashInfer's signatures and numbers of patterns, read from its source: its module needs what is for GPUs."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

from tilescale.ops import allreduce_fusion as ours

found = find_spec("flashinfer")
if found is None or not found.submodule_search_locations:
    print("skipped: flashinfer is not installed", flush=True)
    sys.exit(0)
folder = Path(next(iter(found.submodule_search_locations))) / "comm"
trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
nodes = [node for tree in trees for node in ast.walk(tree)]


def arguments(name: str) -> list[str]:
    """Names of a function's arguments, those by position first."""
    (function,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


for name in ("allreduce_fusion", "create_allreduce_fusion_workspace"):
    theirs, mine = arguments(name), inspect.signature(getattr(ours, name)).parameters.values()
    by_position = [each.name for each in mine if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert theirs[: len(by_position)] == by_position, name
    assert {each.name for each in mine if each.kind is each.KEYWORD_ONLY} <= set(theirs), name

(numbers,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "AllReduceFusionPattern"]
values = {each.targets[0].id: each.value.value for each in numbers.body if isinstance(each, ast.Assign)}  # type: ignore[attr-defined]
served = {name: number for name, number in vars(ours.AllReduceFusionPattern).items() if name.startswith("k")}
assert served and served.items() <= values.items(), (served, values)
print("passed", flush=True)
