# SPDX-License-Identifier: MIT
"""Programs whose names are words of C++ have text that nvcc compiles, and errors in the user's names."""

import shutil

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tests.emulator.support import blank
from tilelang_core.compile import cuda_source, device_code
from tilescale.errors import OutOfBoundsError

TARGET = {"kind": "cuda", "arch": "sm_90a"}


@T.prim_func
def plain(this: T.Tensor((128, 128), "float32"), blockIdx: T.Tensor((128, 128), "float32"), delete: T.int32):
    with T.Kernel(1, threads=128):
        new, template = T.alloc_shared((128, 128), "float32"), T.alloc_fragment((128, 128), "float32")
        static = T.alloc_local((4,), "float32")
        operator = T.alloc_var("int32")
        operator = delete + 1
        T.copy(this, new)
        T.sync_threads()
        for friend in T.serial(4):
            static[friend] = new[friend + operator, 0]
        typename = delete * 2
        for i, j in T.Parallel(128, 128):
            template[i, j] = new[i, j] + static[0] + typename
        T.copy(template, blockIdx)


@T.prim_func
def exchanged(
    this: T.Tensor((128, 64), "float32"), export: T.Tensor((128, 64), "float32"), using: T.Tensor((2,), "int32")
):
    with T.Kernel(device=2, block=2, threads=128) as auto:
        new = T.alloc((64, 64), "float32", level="l1")
        with T.Scale("block"), T.Scale("device") as (mutable, size):
            T.copy(this[auto * 64, 0], new)
            T.copy(new, export[auto * 64, 0], dst=(mutable + 1) % size, signal=using[auto])
            T.wait(using[auto], ">=", 1)
            T.copy(export[auto * 64, 0], new)
            for i, j in T.Parallel(64, 64):
                export[auto * 64 + i, j] = new[i, j] * 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("text", [lambda: cuda_source(plain, TARGET), lambda: source(exchanged)], ids=["one", "two"])
def test_nvcc_compiles_such_programs(text):
    assert device_code(text(), TARGET)


def test_values_and_names_are_the_users():
    X, Y = torch.randn(128, 128), blank(128, 128)
    tilescale.emulate(plain, [X, Y, 3])
    assert torch.equal(Y, X + X[4, 0] + 6)
    with pytest.raises(OutOfBoundsError, match=r"\bnew\[\d"):
        tilescale.emulate(plain, [X, Y, 200])
