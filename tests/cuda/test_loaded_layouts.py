# SPDX-License-Identifier: MIT
"""A program that was written to a file and read has the text of the traced one, with layouts of its tiles as well."""

from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import source
from tilelang_core import compile, records
from tilelang_core.lru import LruCache
from tilescale.ops import rounding

SIZE, THREADS = 64, 128

LAYOUTS = {
    "shared": lambda: T.Layout((SIZE, SIZE), lambda i, j: i * (SIZE + 8) + j),
    "of two numbers": lambda: T.Layout((SIZE, SIZE), rounding.spread),
    "fragment": lambda: T.Fragment((SIZE, SIZE), forward_fn=lambda i, j: (i * 2 + j // 32, j % 32)),
    "copies": lambda: T.Fragment((SIZE, SIZE), forward_fn=lambda i, j, copy: (i + 64 * copy.var, j), replicate=2),
}


def program(layout: str) -> Any:
    """Two devices: each copies its rows through a tile."""

    @T.prim_func
    def through_a_tile(X: T.Tensor((SIZE, SIZE), "float16"), Y: T.Tensor((SIZE, SIZE), "float16")):
        with T.Kernel(device=2, block=1, threads=THREADS):
            with T.Scale("block"):
                tile = T.alloc((SIZE, SIZE), "float16", level="l0" if layout in ("fragment", "copies") else "l1")
                T.annotate_layout({tile: LAYOUTS[layout]()})
                for i, j in T.Parallel(SIZE, SIZE):
                    tile[i, j] = X[j, i] + 1
                for i, j in T.Parallel(SIZE, SIZE):
                    Y[i, j] = tile[i, j]

    return through_a_tile


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_program_has_the_text_of_the_traced_one(layout: str, monkeypatch: pytest.MonkeyPatch):
    made = program(layout)
    (read,) = records.loads(records.dumps((made,)))
    wanted = source(made)
    monkeypatch.setattr(compile, "_generated", LruCache(1))  # else the text is known by the script, which is the same
    assert source(read) == wanted
