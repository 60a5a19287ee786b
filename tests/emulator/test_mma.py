# SPDX-License-Identifier: MIT
"""GEMMs of a warp's registers by `T.ptx_mma`, filled as PTX's fragments are."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import UnsupportedError

KINDS = [
    ("float16", "fp16", 16, "float32", "fp32"),
    ("bfloat16", "bf16", 16, "float32", "fp32"),
    ("float16", "fp16", 8, "float16", "fp16"),
    ("int8", "int8", 32, "int32", "int32"),
    ("float32", "tf32", 8, "float32", "fp32"),
]


def product(kind, short, depth, total, short_total, shape=None):
    size = depth // 2, depth // 4, 4
    shape = f"m16n8k{depth}" if shape is None else shape
    each = {"int8": 4, "float32": 1}.get(kind, 2)  # elements of a register

    @T.prim_func
    def program(A: T.Tensor((2, 16, depth), kind), B: T.Tensor((2, depth, 8), kind), C: T.Tensor((2, 16, 8), total)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            w, g, t = tx // 32, tx % 32 // 4, tx % 4
            a, b, c = T.alloc_local((2 * size[0],), kind), T.alloc_local((size[1],), kind), T.alloc_local((4,), total)
            for i in T.serial(size[0]):
                a[size[0] + i] = A[w, g + 8 * (i // each % 2), t * each + i % each + i // (2 * each) * 4 * each]
            for i in T.serial(size[1]):
                b[i] = B[w, t * each + i % each + i // each * 4 * each, g]
            for i in T.serial(4):
                c[i] = C[w, g + 8 * (i // 2), 2 * t + i % 2]
            T.ptx_mma(
                total, shape, "row", "col", short, short, short_total,
                a.data, size[0], b.data, 0, c.data, 0, T.bool(False),
            )  # fmt: skip
            for i in T.serial(4):
                C[w, g + 8 * (i // 2), 2 * t + i % 2] = c[i]

    return program


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]} k{kind[2]}")
def test_fragments_are_multiplied(kind):
    given, total = getattr(torch, kind[0]), getattr(torch, kind[3])
    generator = torch.Generator().manual_seed(1)
    A, B, C = (
        torch.randint(-8, 9, shape, generator=generator) for shape in ((2, 16, kind[2]), (2, kind[2], 8), (2, 16, 8))
    )
    args = [A.to(given), B.to(given), C.to(total)]
    tilescale.emulate(product(*kind), args)
    assert torch.equal(args[2].double(), (A.double() @ B.double() + C))
    assert tilescale.emulate(product(*kind), data=False).time_us > 0


def test_other_shapes_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="does not run mma of shape m8n8k4"):
        tilescale.emulate(product(*KINDS[0], shape="m8n8k4"), data=False)
