# SPDX-License-Identifier: MIT
"""The seam to TileLang: versions, source rewriting, and what is asked of the IR."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
import tilelang.language as stock
from tilelang.language.eager import builder

import tilescale.language as T
from tilelang_core import TESTED, TileLangCacheError, TileLangVersionError, dialect, ir, require_tilelang, trace

# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [TESTED[0], f"{TESTED[0]}.post1", f"{TESTED[0]}+cu128", f"{TESTED[0]}.dev3"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert require_tilelang() == version


@pytest.mark.parametrize("version", ["0.1.14", TESTED[1], "0.1.16.post1", "0.2.0", "1.0", "0.1", f"{TESTED[1]}rc1"])
def test_other_versions(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(TileLangVersionError) as caught:
        require_tilelang()
    text = str(caught.value)
    assert f"TileLang {version} is installed" in text
    assert f'pip install "tilelang>={TESTED[0]},<{TESTED[1]}"' in text


def test_no_tilelang(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(TileLangVersionError, match="TileLang is not installed. Install it with: pip install"):
        require_tilelang()
    assert issubclass(TileLangVersionError, ImportError)


def test_a_home_that_cannot_be_written():
    """TileLang makes folders when it is imported: the error names the folder, and the variable to set."""
    home = {"HOME": os.devnull}
    words = [sys.executable, "-c", "import tilescale.language"]
    failed = subprocess.run(words, env=os.environ | home, capture_output=True, text=True, check=False)
    last = failed.stderr.splitlines()[-1]
    assert f"the folder of its cache, {os.devnull}/.tilelang" in last and "Set TILELANG_CACHE_DIR" in last
    assert issubclass(TileLangCacheError, ImportError)


# -- rewriting ---------------------------------------------------------------------------------------------------------


def test_installing_twice_does_nothing():
    before = builder.mutate
    dialect.install()
    assert builder.mutate is before is dialect.Generator


class Manager:
    """A user's context manager."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __enter__(self) -> tuple[int, int]:
        return 1, 2

    def __exit__(self, *_: object) -> None:
        pass


def test_other_context_managers_keep_pythons_meaning():
    existing = Manager()
    made = Manager.made

    @stock.prim_func
    def f(A: stock.Tensor((4,), "int32")):
        with stock.Kernel(1, threads=32):
            with Manager() as (a, b), existing:
                A[0] = a + b
            with Manager() as both, existing as (c, d):
                A[1] = both[0] + c + d

    # Once for each `with`: rewriting the source runs none of the user's calls.
    assert Manager.made == made + 2
    assert "A[0] = 3" in f.script() and "A[1] = 4" in f.script()


def test_rewriting_runs_no_code_of_the_user():
    calls = []

    def factory():
        calls.append(1)
        return T

    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            with factory().Scale("warp") as (rank, size):
                A[rank] = size

    assert calls == [1]


def test_a_context_manager_after_two_names():
    entered = []

    class Noted(Manager):
        def __enter__(self):
            entered.append(1)

    noted = Noted()

    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("warp") as rank, size, noted:
                A[rank] = size

    assert entered == [1]


def test_names_of_scales_show_in_the_ir():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=4, block=1, threads=64):
            with T.Scale("device") as me, everybody:
                A[me] = everybody

    assert "me: T.int32 = T.tilescale.rank" in f.script()


def test_operations_are_registered_once():
    with pytest.raises(ValueError, match="tilescale.copy is registered twice"):
        trace.register_op("tilescale.copy")


def test_no_location_outside_a_trace():
    assert trace.locations() == [] and not trace.is_tracing() and trace.launch() is None


# -- the IR ------------------------------------------------------------------------------------------------------------

x, y = ir.Var("x", "int32"), ir.Var("y", "int32")


def test_constants():
    assert [ir.constant(e) for e in (3, True, ir.IntImm("int32", 4), x, x - x + 2, 1.5)] == [3, 1, 4, None, 2, None]


def test_variables_and_substitution():
    assert ir.variables(x + y * 2) == {x, y} and ir.variables(3) == set()
    assert ir.constant(ir.substitute(x + y, {x: ir.int_node(1), y: ir.int_node(2)})) == 3


def test_simplification_over_ranges():
    assert ir.variables(ir.simplify((x * 4 + y) // 4, {y: (0, 4)})) == {x}
    assert ir.variables(ir.simplify((x * 4 + y) % 4, {y: (0, 4)})) == {y}


@stock.prim_func
def sample(A: stock.Tensor((8,), "float32"), B: stock.Tensor((8,), "int32")):
    with stock.Kernel(4, threads=32) as bx:
        for i in stock.serial(B[0]):
            if A[i] > 0:
                A[bx] = A[i] + 1


def statement(kind: type) -> ir.Stmt:
    return [s for s in ir.statements(sample.body) if isinstance(s, kind)][-1]


def test_what_a_statement_itself_uses():
    names = {kind: {v.name for v in ir.uses(statement(kind))} for kind in (ir.For, ir.IfThenElse, ir.BufferStore)}
    assert names == {ir.For: {"B"}, ir.IfThenElse: {"A", "i"}, ir.BufferStore: {"A", "i", "bx"}}


def test_purity():
    store = statement(ir.BufferStore)
    assert not ir.is_pure(store.value) and ir.is_pure(x * 2 + y)


def test_fingerprints_say_what_a_function_says():
    def build(value: int):
        @stock.prim_func
        def f(A: stock.Tensor((8,), "float32")):
            with stock.Kernel(4, threads=32) as bx:
                A[bx] = value

        return f

    assert ir.fingerprint(build(1)) == ir.fingerprint(build(1)) != ir.fingerprint(build(2))


def test_bits():
    assert [ir.bits(t) for t in ("float32", "bfloat16", "float8_e4m3", "int4", "float32x4")] == [32, 16, 8, 4, 128]
