# SPDX-License-Identifier: MIT
"""Names of integers in parallel loops are inlined before stock TileLang computes their bounds."""

from __future__ import annotations

from typing import Any

import tilelang  # noqa: F401 - it brings tvm
from tvm import tirx

from tests.cuda.support import lowered
from tilelang_core.inlined_names import with_inlined_names
from tilelang_core.ir import contains, same, walk
from tilelang_core.rewrite import sequence
from tilescale.ops import gemm_rs
from tilescale.ops.gemm_tiles import GemmSpec, GemmTiling

BEGIN, ROW, COLUMN = (tirx.Var(name, "int32") for name in "mij")
OUT, READ = (tirx.decl_buffer((4096,), "int32", name) for name in ("out", "read"))


def named(value: Any, name: str) -> tuple[tirx.Bind, tirx.Var]:
    var = tirx.Var(name, value.dtype)
    return tirx.Bind(var, value), var


def looping(kind: int, *stmts: tirx.Stmt) -> tirx.Stmt:
    return tirx.For(ROW, 0, 8, kind, tirx.For(COLUMN, 0, 8, kind, sequence(stmts)))


def test_names_of_names_are_inlined():
    (row, r), store = named(BEGIN + ROW, "row"), lambda place: tirx.BufferStore(OUT, COLUMN, [place])
    place, p = named(r * 8 + COLUMN, "place")
    wanted = looping(tirx.ForKind.PARALLEL, store((BEGIN + ROW) * 8 + COLUMN))
    assert same(with_inlined_names(looping(tirx.ForKind.PARALLEL, row, place, store(p))), wanted)


def test_other_names_stay():
    (row, r), (read, value) = named(BEGIN + ROW, "row"), named(tirx.BufferLoad(READ, [ROW]), "value")
    fraction, f = named(tirx.Cast("float32", ROW), "fraction")
    for stmt in (
        looping(tirx.ForKind.SERIAL, row, tirx.BufferStore(OUT, COLUMN, [r])),
        looping(tirx.ForKind.PARALLEL, read, tirx.BufferStore(OUT, value, [ROW])),
        looping(tirx.ForKind.PARALLEL, fraction, tirx.BufferStore(OUT, tirx.Cast("int32", f), [ROW])),
    ):
        assert with_inlined_names(stmt).same_as(stmt)


def test_a_gemm_that_adds_arrived_rows_has_none():
    of = GemmSpec(512, 512, "bfloat16", GemmTiling(128, 256, 1.0, stages=3), True, False)
    (kernel,) = lowered(gemm_rs.program(2, of, 132)).kernels
    loops: list[tirx.For] = []
    walk(kernel.func.body, lambda node: loops.append(node) if isinstance(node, tirx.For) else None)
    parallel = [loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL]
    assert parallel and not any(contains(loop, lambda node: isinstance(node, tirx.Bind)) for loop in parallel)
