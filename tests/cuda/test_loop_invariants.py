# SPDX-License-Identifier: MIT
"""Index arithmetic that nvcc would leave in a loop is computed once before it, with the same value."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import tilelang  # noqa: F401 - it brings tvm
from tvm import tirx

from tests.cuda.support import source
from tilelang_core import role_schedule
from tilelang_core.ir import contains
from tilelang_core.loop_invariants import with_hoisted_invariants
from tilelang_core.rewrite import renamed
from tilescale.ops import ag_gemm_programs
from tilescale.ops.gemm_tiles import GemmSpec, GemmTiling

OF = GemmSpec(512, 512, "bfloat16", GemmTiling(64, 64, 1.0, stages=2), True, False)


def var(name: str, dtype: str = "int32") -> tirx.Var:
    return tirx.Var(name, dtype)


def storing(value: Any, kind: Any = tirx.ForKind.SERIAL) -> tirx.PrimFunc:
    """Stores `value(i, j)` in two loops, i around j, the inner one of the kind."""
    i, j, handle = var("i"), var("j"), var("handle", "handle")
    out = tirx.decl_buffer((4096,), "int32", "out")
    inner = tirx.For(j, 0, 8, kind, tirx.BufferStore(out, value(i, j), [i * 8 + j]))
    outer = tirx.For(i, 0, 8, tirx.ForKind.SERIAL, inner)
    return tirx.PrimFunc([handle], outer, buffer_map={handle: out})


def stored(func: tirx.PrimFunc) -> tirx.BufferStore:
    found: list[tirx.BufferStore] = []
    contains(func.body, lambda node: isinstance(node, tirx.BufferStore) and found.append(node))
    return found[0]


def test_quotients_by_arguments_are_hoisted_to_the_loop_that_changes_them():
    n = var("n")
    hoisted = with_hoisted_invariants(storing(lambda i, j: tirx.truncdiv(i + 7, n) + tirx.truncdiv(9, n) + j))
    assert not contains(stored(hoisted), lambda node: isinstance(node, tirx.Div))
    bind, outer = hoisted.body.seq
    assert isinstance(bind, tirx.Bind) and isinstance(outer, tirx.For)
    own, inner = outer.body.seq
    assert isinstance(own, tirx.Bind) and isinstance(inner, tirx.For)


def test_a_loop_keeps_its_step():
    n, i, handle = var("n"), var("i"), var("handle", "handle")
    out = tirx.decl_buffer((4096,), "int32", "out")
    store = tirx.BufferStore(out, tirx.truncdiv(9, n), [i])
    loop = tirx.For(i, 0, 8, tirx.ForKind.SERIAL, store, step=tirx.IntImm("int32", 2))
    hoisted = with_hoisted_invariants(tirx.PrimFunc([handle], loop, buffer_map={handle: out}))
    assert isinstance(hoisted.body.seq[0], tirx.Bind) and int(hoisted.body.seq[1].step) == 2


@pytest.mark.parametrize("rewritten", [renamed, lambda loop: role_schedule.named(loop, "steps")])
def test_other_rewrites_keep_it_too(rewritten: Any):
    loop = tirx.For(var("i"), 0, 8, tirx.ForKind.SERIAL, tirx.Evaluate(0), step=tirx.IntImm("int32", 2))
    assert int(rewritten(loop).step) == 2


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda i, j: tirx.truncdiv(i, 7) * 3 + j, id="nvcc hoists divisions by constants"),
        pytest.param(lambda i, j: tirx.truncdiv(i, j + 1), id="it changes"),
        pytest.param(lambda i, j: tirx.truncdiv(1, tirx.call_extern("int32", "now")), id="a call"),
    ],
)
def test_other_values_stay_in_the_loop(value: Any):
    func = storing(value)
    assert with_hoisted_invariants(func).same_as(func)


def test_what_memory_holds_is_read_again():
    held = tirx.decl_buffer((1,), "int32", "held")
    func = storing(lambda i, j: tirx.truncdiv(64, held[0]))
    assert with_hoisted_invariants(func).same_as(func)


@pytest.mark.parametrize(
    "made",
    [
        lambda: ag_gemm_programs.program(2, OF, blocks=8),
        pytest.param(lambda: import_module("tilescale.ops.gemm_rs").program(2, OF, 8), marks=pytest.mark.nightly),
    ],
)
def test_a_producer_computes_the_coordinates_of_a_tile_once(made: Any):
    loads = re.findall(r"tma_load\([AGB]_desc.*", source(made()))
    assert len(loads) >= 2
    assert all("invariant" in load and "(float)" not in load for load in loads), loads
