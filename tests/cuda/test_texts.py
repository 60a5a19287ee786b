# SPDX-License-Identifier: MIT
"""A compiled kernel is kept under what rewrote its text, too."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import tilelang

import tilescale.language as T
from tilelang_core import compile as stock
from tilelang_core import zero_trip_loops
from tilelang_core.source_rewrites import Rewrite, keyed
from tilescale.backends.tilelang.text import REWRITES

MODULE = '"""{doc}"""\ndef rewrite(text):\n    return _inner(text)\n\ndef _inner(text):\n    return text + "// {end}"\n'


def rewrite_of(folder: Path, **words: str) -> Rewrite:
    """A module's function `rewrite`."""
    path = folder / f"rewriting_{'_'.join(words.values())}.py"
    path.write_text(MODULE.format(**words), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("rewriting", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewriting"] = module
    spec.loader.exec_module(module)
    return module.rewrite


def program(loop: Any = 4) -> Any:
    @T.prim_func
    def doubled(X: T.Tensor((128,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            for i in T.serial(n if loop is None else loop):
                X[T.get_thread_binding()] = X[T.get_thread_binding()] * 2 + i

    return doubled


def compiled(monkeypatch: pytest.MonkeyPatch, func: Any, rewrites: Any = ()) -> str:
    """Inputs of the key of TileLang's cache."""
    monkeypatch.setattr(tilelang, "compile", lambda func, **options: func.script(show_meta=True))
    return stock.KernelCompilation(func, tuple(rewrites)).run()


def test_a_rewrite_that_changes_anywhere_in_its_module_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "rewriting", raising=False)
    scripts = []
    for words in (
        {"doc": "a", "end": "1"},
        {"doc": "a", "end": "2"},
        {"doc": "b", "end": "1"},
        {"doc": "a", "end": "1"},
    ):
        scripts.append(compiled(monkeypatch, program(), [rewrite_of(tmp_path, **words)]))
    first, *others, again = scripts
    assert len({first, *others}) == 3 and again == first
    del sys.modules["rewriting"]


def test_kernels_are_not_those_that_stock_has_cached(monkeypatch: pytest.MonkeyPatch):
    """Stock TileLang loses parts of some indices; which ones is known when layouts are, after the cache was asked."""
    func = program()
    assert keyed(func, ()) is func
    plain = compiled(monkeypatch, func)
    assert "tilescale.text" in plain
    assert compiled(monkeypatch, program(None)) != plain, "its loop may have no step"


def test_ours_have_the_key(monkeypatch: pytest.MonkeyPatch):
    assert "tilescale.text" in compiled(monkeypatch, program(), REWRITES)


@pytest.mark.parametrize("rewrite", [*REWRITES, zero_trip_loops.mended], ids=lambda r: r.__name__)
def test_what_a_rewrite_does_lies_in_its_module(rewrite: Rewrite):
    """Except properties of Python and TVM, and the reader of TIR, which decides whether a rewrite runs at all."""
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(rewrite))))
        if isinstance(node, ast.ImportFrom)
    ]
    ours = {node.module for node in imports if node.module.startswith(("tilescale", "tilelang_core"))}
    assert ours <= {"tilelang_core.ir"}
