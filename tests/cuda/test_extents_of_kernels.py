# SPDX-License-Identifier: MIT
"""Extents of a program in its kernels: each is that of a tensor of the kernel, or an argument of its own."""

import tilelang
from tvm.target import Target

import tilescale.language as T
from tests.cuda.support import lowered
from tilelang_core.mends import mended
from tilescale.backends.tilelang.lowering.arguments import HostVariable


def two_grids():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def program(X: T.Tensor((n,), "int32"), Y: T.Tensor((m,), "int32"), Z: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=T.ceildiv(n, 32), threads=32) as block:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                for i in T.Parallel(32):
                    if block * 32 + i < n:
                        X[block * 32 + i] = rank
        with T.Kernel(device=2, block=T.ceildiv(m, 64), threads=32) as block:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                for i in T.Parallel(1):
                    Z[0] = T.if_then_else(block + i < n, n, rank)

    return program


def test_an_extent_that_no_tensor_of_the_kernel_has_is_passed():
    """In the second grid no statement reads X or Y, whose extents it uses."""
    made = lowered(two_grids()).kernels
    passed = [{a.var.name for a in one.arguments if isinstance(a, HostVariable)} for one in made]
    assert passed == [set(), {"n", "m"}]
    with Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        for one in made:  # host code binds every variable, or TileLang raises
            tilelang.lower(mended(one.func), target=target, enable_host_codegen=True)
