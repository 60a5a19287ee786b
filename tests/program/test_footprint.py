# SPDX-License-Identifier: MIT
"""Programs that a device holds at once, by the registers and the shared memory of one."""

from __future__ import annotations

from typing import Any

import tilescale.language as T
from tests.overlap.support import H200
from tilescale.passes.structure import structure
from tilescale.program.effects import names_of, phases
from tilescale.program.footprint import held
from tilescale.program.model import GridPhase


def product_then_scale() -> Any:
    """A grid whose tiles fill half of the registers each, then one of small tiles."""

    @T.prim_func
    def f(A: T.Tensor((256, 256), "float32"), B: T.Tensor((256, 256), "float32")):
        with T.Kernel(device=2, block=4, threads=256) as b:
            with T.Scale("block"):
                c = T.alloc((128, 256), "float32", level="l0")
                T.copy(A[b // 2 * 128, 0], c)
                T.copy(c, B[b // 2 * 128, 0])
            with T.Scale("device"):
                T.barrier()
            with T.Scale("block"):
                s = T.alloc((16, 64), "float32", level="l0")
                T.copy(A[b * 16, 0], s)
                T.copy(s, B[b * 16, 0])

    return f


def test_a_grid_has_its_own_registers():
    program = structure(product_then_scale(), H200)
    names, each = names_of(program), H200.count("block", "device")
    first, second = ((p, launch) for p, launch in phases(program.body) if isinstance(p, GridPhase))
    assert held(*first, names, H200) == 2 * each
    assert held(*second, names, H200) == 8 * each, "2048 threads"
    assert held(*second, names, H200, added=64 << 10) == 3 * each
