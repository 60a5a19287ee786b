# SPDX-License-Identifier: MIT
"""Results of TileLang's front end are cached, unless they would differ."""

import contextlib
import importlib.util
import linecache
from typing import Any

import pytest

import tilescale.language as T
from tilelang_core import compile as stock
from tilelang_core import dialect
from tilelang_core.lru import LruCache

TARGET = {"kind": "cuda", "arch": "sm_90a"}


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that are rewritten, by name."""
    names: list[str] = []
    visit = dialect.Mutator.visit_FunctionDef
    monkeypatch.setattr(dialect.Mutator, "visit_FunctionDef", lambda self, n: names.append(n.name) or visit(self, n))
    monkeypatch.setattr(dialect, "_rewritten", LruCache(64))
    return names


def test_a_full_cache_evicts_the_entry_that_was_used_longest_ago():
    cache: LruCache[str, int] = LruCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache.made("a", lambda: 0) == 1 and cache.made("c", lambda: 3) == 3
    assert dict(cache) == {"a": 1, "c": 3}
    assert cache.get("a") == 1 and cache.get("b") is None
    cache["d"] = 4
    assert dict(cache) == {"a": 1, "d": 4}


def filled(length: int, enter: Any, size: Any = None) -> Any:
    @T.prim_func
    def program(X: T.Tensor((length,), "int32")):
        with T.Kernel(device=2, threads=32):
            with enter("device") as rank, size:
                T.fill(X, rank + length)

    return program


def test_other_values_of_names_need_no_other_source(rewritten: list[str], monkeypatch: pytest.MonkeyPatch):
    """The lines are parsed, rewritten and compiled once."""
    parsed: list[Any] = []
    parse = dialect.parsed
    monkeypatch.setattr(dialect, "parsed", lambda *where: parsed.append(where) or parse(*where))
    texts = [filled(length, T.Scale).script() for length in (8, 16, 8)]
    assert texts[0] == texts[2] != texts[1] and "(16,)" in texts[1]
    assert rewritten == ["program"] and len(parsed) == 1


def test_what_a_name_means_decides(rewritten: list[str]):
    """With T.Scale, `size` is a name that is bound; with anything else it is a context manager, as in Python."""
    entered: list[str] = []

    @contextlib.contextmanager
    def noted(name: str):
        entered.append(name)
        yield 0

    scaled = filled(8, T.Scale, noted("size")).script()
    assert not entered
    plain = filled(8, noted, noted("size")).script()
    assert entered == ["device", "size"] and "tilescale.scale" not in plain
    assert filled(8, T.Scale, noted("size")).script() == scaled
    assert rewritten == ["program"] * 3


def test_changed_lines_are_read_again(rewritten: list[str], tmp_path):
    path = tmp_path / "changing.py"
    text = """import tilescale.language as T

@T.prim_func
def program(X: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=32):
        T.fill(X, {value})
"""
    scripts = []
    for value in (3, 4444, 4444):
        path.write_text(text.format(value=value))
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location("changing", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        scripts.append(module.program.script())
    assert "4444" not in scripts[0] and "4444" in scripts[1] and scripts[1] == scripts[2]
    assert rewritten == ["program"] * 2


def test_a_macro_is_rewritten_when_it_is_used(rewritten: list[str], tmp_path):
    """By the lines and with the values of names that it was defined with."""
    path = tmp_path / "macros.py"
    path.write_text("""import tilescale.language as T

def defined(value):
    @T.macro
    def filled(X):
        T.fill(X, value)

    value += 1000
    return filled
""")
    spec = importlib.util.spec_from_file_location("macros", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    filled = module.defined(3333)
    path.write_text("# other lines\n" * 12)
    linecache.checkcache(str(path))
    assert rewritten == []

    @T.prim_func
    def program(X: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            filled(X)

    assert "3333" in program.script() and rewritten == ["program", "filled"]


def test_the_rewritten_source():
    @T.macro
    def sent(X):
        half = 4
        with T.Scale("device") as rank, size:
            T.fill(X, rank + size + half)

    assert "rank, size" in sent.source and sent.source == sent.source


def test_a_function_is_lowered_once(monkeypatch: pytest.MonkeyPatch):
    """For each target and its options; a text that is rewritten is that of the same lowering."""
    lowered = []
    lower = stock.tilelang.lower
    monkeypatch.setattr(stock.tilelang, "lower", lambda func, **how: lowered.append(how) or lower(func, **how))
    monkeypatch.setattr(stock, "_generated", LruCache(128))

    def program(value: int) -> Any:
        @T.prim_func
        def main(X: T.Tensor((32,), "float32")):
            with T.Kernel(1, threads=32):
                T.fill(X, value)

        return main

    text = stock.generate(program(1), TARGET).text
    assert stock.generate(program(1), TARGET, rewrites=[str.upper]).text == text.upper()
    assert stock.generate(program(1), TARGET).text == text and len(lowered) == 1
    assert stock.generate(program(2), TARGET).text != text
    stock.generate(program(1), {**TARGET, "arch": "sm_80"})
    stock.generate(program(1), TARGET, {"tl.disable_warp_specialized": True})
    assert len(lowered) == 4
    monkeypatch.setattr(stock._generated, "_most", 2)
    stock.generate(program(3), TARGET)
    assert len(stock._generated) == 2
