# SPDX-License-Identifier: MIT
"""Machines, programs and a stopwatch that the tests of simulated time share."""

import tilescale
import tilescale.language as T
from tilescale.hda import Machine

H200 = Machine.load("h200-sxm-8")
LAUNCH = H200.tensor_level.launch


def seconds(program, args=None, machine=H200, **more) -> float:
    return tilescale.emulate(program, args, machine=machine, data=False, **more).time_us / 1e6


def derived(tmp_path, text: str, name: str = "derived", base: str = "h200-sxm-8") -> Machine:
    """A machine that differs from a built-in one as the text says."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(f"extends: {base}\ntitle: {name}\n{text}")
    return Machine.load(path)


def product(m: int, n: int, k: int, stages: int, dtype: str = "float16", depth: int = 32):
    width = 256

    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(n // width, m // 128, threads=256) as (bx, by):
            a = T.alloc_shared((128, depth), dtype)
            b = T.alloc_shared((depth, width), dtype)
            c = T.alloc_fragment((128, width), "float32")
            T.clear(c)
            for ko in T.Pipelined(k // depth, num_stages=stages):
                T.copy(A[by * 128, ko * depth], a)
                T.copy(B[ko * depth, bx * width], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * width])

    return program


def copied(rows: int):
    @T.prim_func
    def program(X: T.Tensor((rows, 4096), "float32"), Y: T.Tensor((rows, 4096), "float32")):
        with T.Kernel(rows, threads=128) as bx:
            tile = T.alloc_fragment((1, 4096), "float32")
            T.copy(X[bx, 0], tile)
            T.copy(tile, Y[bx, 0])

    return program
