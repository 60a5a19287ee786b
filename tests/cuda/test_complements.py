# SPDX-License-Identifier: MIT
"""Numbers that fall keep their values where a layout divides them, and where neighbours are computed as a vector."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import tilelang
import tilelang.language as T
from tilelang.backend.target import determine_target

from tests.cuda.host_text import on_host
from tilelang_core.compile import cuda_source

TARGET = determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True)
SIZE, THREADS = 64, 64


@T.prim_func
def main(out: T.Tensor((9, SIZE, SIZE), "int32")):
    with T.Kernel(1, threads=THREADS):
        tile = T.alloc_shared((SIZE, SIZE), "int32")
        T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile)})
        for i, j in T.Parallel(SIZE, SIZE):
            tile[i, j] = i * SIZE + j
        for i, j in T.Parallel(SIZE, SIZE):
            out[0, i, j] = tile[48 - i // 4, 16 - j // 8]
        for i, j in T.Parallel(SIZE, SIZE):
            out[1, i, j] = tile[(64 - j // 2) % 64, i]
        for i, j in T.Parallel(SIZE, SIZE):
            out[2, i, j] = tile[40 - i % 16, 63 - j]
        for i in T.serial(SIZE):
            for j in T.Parallel(SIZE):
                out[3, i, j] = tile[i, 24 - (i + j) // 8]
        for i, j in T.Parallel(SIZE, SIZE):
            out[4, i, j] = (48 - j // 2) % 8
        for i, j in T.Parallel(SIZE, SIZE):
            out[5, i, j] = (32 - j % 32) % 4
        for i, j in T.Parallel(SIZE, SIZE):
            out[6, i, j] = (41 - j % 16) % 64 // 4
        for i, j in T.Parallel(SIZE, SIZE):
            out[7, i, j] = (16 - (64 - i) % 64 // 4) % 8
        k = T.alloc_var("int32")
        k = 0
        while k < SIZE:
            for j in T.Parallel(SIZE):
                out[8, k, j] = tile[(3 - k // 3) % 3, j]
            k = k + 1


def wanted() -> np.ndarray:
    i, j = np.indices((SIZE, SIZE))
    tile = i * SIZE + j
    return np.stack(
        [
            tile[48 - i // 4, 16 - j // 8], tile[(64 - j // 2) % 64, i], tile[40 - i % 16, 63 - j],
            tile[i, 24 - (i + j) // 8], (48 - j // 2) % 8, (32 - j % 32) % 4, (41 - j % 16) % 64 // 4,
            (16 - (64 - i) % 64 // 4) % 8, tile[(3 - i // 3) % 3, j],
        ]
    )  # fmt: skip


def executed(text: str, folder: Path) -> np.ndarray:
    """The results of a text's kernel, executed by threads of the host."""
    kernel = text[text.rindex('extern "C" __global__') :].replace('extern "C" ', "")
    kernel = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", rf"__shared__ \1 \2[{SIZE * SIZE}];", kernel
    )
    out = np.full((9, SIZE, SIZE), -1, np.int32)
    on_host(kernel, "host_threads.h", folder).execute(out.ctypes.data_as(ctypes.c_void_p), THREADS)
    return out


def test_they_keep_their_values(tmp_path: Path):
    np.testing.assert_array_equal(executed(cuda_source(main, TARGET), tmp_path), wanted())


@pytest.mark.nightly
def test_stock_still_gets_them_wrong(tmp_path: Path):
    """When this fails, `tilelang_core/complements.py` can be removed, at least in part."""
    with TARGET:
        found = executed(tilelang.lower(main, target=TARGET).kernel_source, tmp_path)
    assert (found != wanted())[:4].any(axis=(1, 2)).all()
