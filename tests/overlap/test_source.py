# SPDX-License-Identifier: MIT
"""Overlapped programs as source text: executed, the text is the same program."""

from __future__ import annotations

import linecache
from functools import partial
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tests.overlap import test_exchange, test_gather, test_prefetch, test_reductions, test_shifts
from tests.overlap.support import H200, check_same, overlapped
from tests.overlap.test_estimate import gather_then_multiply
from tilescale.errors import UnsupportedError
from tilescale.passes.structure import structure
from tilescale.program.source import source_of

gather = partial(test_gather.gather_then_scale, 3, 7, 3, slots=True, turns=3, grids=2)
reduction = partial(test_reductions.scale_then_reduce, 3, 8, 4)
exchange = partial(test_exchange.around, 2, 7, 3)

PROGRAMS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "gather, and grids in a loop": (gather, {}, test_gather),
    "reduce-scatter by tiles": (reduction, {"carrier": "tiles"}, test_reductions),
    "all-reduce by the queue": (partial(reduction, everywhere=True), {"carrier": "queue"}, test_reductions),
    "exchange": (partial(exchange, slots=True), {"chunk": 3}, test_exchange),
    "layers": (partial(test_prefetch.layers, 3, 4), {}, test_prefetch),
    "ring": (partial(test_shifts.around, 3, 4, 3, guarded=True), {}, test_shifts),
    "there and back": (partial(exchange, before=False, back=True, experts=2), {}, test_exchange),
}


def text_of(func: Any) -> str:
    return source_of(structure(func, H200), H200)


def executed(text: str, name: str = "f") -> Any:
    """Definitions of a text; the tracer reads it from a file."""
    file = f"<{name} as text {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    defined: dict[str, Any] = {}
    with tilescale.use_machine(H200):
        exec(compile(text, file, "exec"), defined)
    return defined[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_is_the_program(name: str):
    program, wanted, tests = PROGRAMS[name]
    changed, _ = overlapped(program(), **wanted)
    text = text_of(changed)
    again = executed(text)
    assert text_of(again) == text
    assert ("in_order=True" in text) == ("reduce" in name)  # own tiles add up
    devices = program.args[0]
    check_same(changed, again, tests.arguments(changed, devices), seeds=(None,))


def test_the_text_of_a_product_gives_the_same_kernel():
    changed, _ = overlapped(gather_then_multiply(4, 2048), chunk=128)
    text = text_of(changed)
    assert source(executed(text)) == source(changed)
    for line in (
        "with T.Kernel(device=4, block=(2, 16), threads=256) as (bx, by):",
        "T.all_gather(A_1, whole, chunk=128, signal=whole_here)",
        "by_tile = (device_rank + 4 - by // 4) % 4 * 4 + by % 4",
        'T.wait(whole_here[by_tile // 4, by_tile % 4], ">=", 1)',
        "for k in T.Pipelined(32, num_stages=3):",
        "T.copy(whole[by_tile * 128, k * 64], a)",
        "T.gemm(a, b, c)",
    ):
        assert line in text


def test_what_has_no_words_is_named():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            T.call_extern("handle", "something", X.data)

    with pytest.raises(UnsupportedError, match="call_extern has no source text") as caught:
        text_of(f)
    assert caught.value.where[0].file == __file__
