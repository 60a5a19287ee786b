# SPDX-License-Identifier: MIT
"""Programs find self-registering functions, independently of the imports of a process."""

import ast

import networkx

from tests.test_architecture import at_module_level, imported, module, sources, tree
from tilescale.backends.tilelang.lowering import copies

REGISTERS = {"runs", "lowers"}
"""Decorators by which functions of the CUDA back end register themselves, in files that are not listed anywhere."""


def test_what_registers_itself_is_imported():
    """By an import of each module that runs a program: otherwise a process without other imports lacks its operations.
    """
    paths = [*sources("tilescale/backends/cuda"), *sources("tilescale/backends/tilelang")]
    files = {module(path): path for path in paths}
    graph = networkx.DiGraph()
    for name, path in files.items():
        found = [n for node in at_module_level(tree(path).body) for n in imported(node)]
        graph.add_edges_from((name, n if n in files else n.rpartition(".")[0]) for n in found)
    graph.add_edges_from((copies.__name__, name) for name in files if name.startswith(f"{copies.__name__}."))
    loaded = networkx.descendants(graph, "tilescale.backends.cuda.running.execute")
    registering = {
        name
        for name, path in files.items()
        for node in tree(path).body
        for one in getattr(node, "decorator_list", [])
        if isinstance(one, ast.Call) and ast.unparse(one.func) in REGISTERS
    }
    assert len(registering) > 10 and not registering - loaded
