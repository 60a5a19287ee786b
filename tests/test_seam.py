# SPDX-License-Identifier: MIT
"""Few files know the names of TileLang's and TVM's operations, and the positions of their arguments."""

from __future__ import annotations

import ast
import re

import pytest

from tests.test_architecture import nodes, short, sources


def test_stock_operations_are_known_in_the_seam():
    """Names are in tilelang_core/tl.py; tiles.py and scalars.py there, and operations.py, know positions.

    So does graph_patterns.py, of nodes of torch.fx.
    """
    name, wrong = re.compile(r"(tl|tirx)\.[a-z_]"), []
    for path in sources("tilescale"):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and name.match(node.value):
                wrong.append(f"{short(path)}:{node.lineno} spells {node.value!r}")
            if knows_positions(node) and path.name not in ("operations.py", "graph_patterns.py"):
                wrong.append(f"{short(path)}:{node.lineno} reads {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def knows_positions(node: ast.AST) -> bool:
    """Whether code distinguishes the arguments of an operation by their positions, or by their number."""

    def is_arguments(value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call):
            return any(map(is_arguments, value.args)) and ast.unparse(value.func) in ("list", "tuple", "reversed")
        return isinstance(value, ast.Attribute) and value.attr == "args"

    if isinstance(node, ast.Assign):
        return is_arguments(node.value) and any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)
    if isinstance(node, ast.Call):
        spread = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
        counts = any(map(is_arguments, node.args)) and ast.unparse(node.func) == "len"
        return counts or any(map(is_arguments, spread)) and ast.unparse(node.func) != "tir.tile_call"
    return isinstance(node, ast.Subscript) and is_arguments(node.value)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("call.args[0]", True),
        ("call.args[1:]", True),
        ("list(call.args)[2]", True),
        ("target, *rest = call.args", True),
        ("len(call.args) > 1", True),
        ("choose(*call.args)", True),
        ("[visit(a) for a in call.args]", False),
        ("recall(call, list(call.args))", False),
        ("args[0]", False),
    ],
)
def test_positions_are_recognised(code: str, found: bool):
    assert any(map(knows_positions, ast.walk(ast.parse(code)))) == found
