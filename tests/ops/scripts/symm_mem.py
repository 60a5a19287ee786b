# SPDX-License-Identifier: MIT
"""TileScale's implementations of PyTorch's fused operators against PyTorch's unfused ones, in a job of ranks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as theirs

import tilescale
from tilescale.errors import ArgumentError
from tilescale.ops.symm_mem import IMPLEMENTATIONS, _or_theirs

WORLD = tilescale.init()
GROUP, SIZE = "", WORLD.size
E4M3 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same on all ranks for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layout(x: torch.Tensor) -> list[tuple[int, int]]:
    """Extents and strides, without the strides of dimensions of one element, which are meaningless."""
    return [(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def close(got: torch.Tensor, like: torch.Tensor, want: torch.Tensor) -> None:
    """The values of a reference in float64, and the layout of PyTorch's result."""
    assert got.shape == like.shape and got.dtype == like.dtype
    assert layout(got) == layout(like), (layout(got), layout(like))
    off = max(2.5 * torch.finfo(got.dtype).eps, 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=off, atol=off * float(want.abs().mean()) + 1e-6)


def check_gathers(name: str) -> None:
    for dim, keeps, shape in itertools.product((0, 1), (False, True), ((2, 4, 32), (1, 6, 32), (8, 32))):
        if dim >= len(shape) - 1:
            continue
        shards = [random(*shape, seed=rank) for rank in range(SIZE)]
        Bs = [random(32, 16, seed=9), random(24, 32, seed=8).t()]
        given = shards[WORLD.rank], Bs, dim, name
        like_A, like = theirs._fused_all_gather_matmul_fallback(*given, return_A=keeps)
        A, results = IMPLEMENTATIONS["fused_all_gather_matmul"](*given, return_A=keeps)
        whole = torch.cat(shards, dim)
        assert (A is None) == (not keeps) and (A is None or torch.equal(A, whole) and layout(A) == layout(like_A))
        for result, one, B in zip(results, like, Bs, strict=True):
            close(result, one, whole.double() @ B.double())


def check_inner_dimensions(name: str) -> None:
    for k, shape in itertools.product((64, 24), ((2, 4), (1, 6), (8,))):
        shards = [random(*shape, k, seed=rank) for rank in range(SIZE)]
        one, other = random(SIZE * k, 16, seed=9), random(24, SIZE * k, seed=8).t()
        whole = torch.cat(shards, -1)
        for Bs, keeps in itertools.product(([one], [other], [one, other]), (False, True)):
            given = shards[WORLD.rank], Bs, len(shape), name
            like_A, like = theirs._fused_all_gather_matmul_fallback(*given, return_A=keeps)
            A, results = IMPLEMENTATIONS["fused_all_gather_matmul"](*given, return_A=keeps)
            assert (A is None) == (not keeps) and (A is None or torch.equal(A, whole) and layout(A) == layout(like_A))
            for result, wanted, B in zip(results, like, Bs, strict=True):
                close(result, wanted, whole.double() @ B.double())


SHAPES = (2 * SIZE, 4, 16), (1, 3 * SIZE, 16), (4 * SIZE, 16)


def check_scatters(name: str) -> None:
    for dim, op, shape in itertools.product((0, 1, 2), ("sum", "avg"), SHAPES):
        if dim >= len(shape) or (dim < len(shape) - 1 and shape[dim] % SIZE):
            continue
        wide = 16, 8 * SIZE
        parts, Bs = ([random(*s, seed=10 * rank + n) for rank in range(SIZE)] for n, s in ((1, shape), (2, wide)))
        given = parts[WORLD.rank], Bs[WORLD.rank], op, dim, name
        like = theirs._fused_matmul_reduce_scatter_fallback(*given)
        whole = sum(a.double() @ b.double() for a, b in zip(parts, Bs, strict=True)) / (SIZE if op == "avg" else 1)
        close(IMPLEMENTATIONS["fused_matmul_reduce_scatter"](*given), like, whole.chunk(SIZE, dim)[WORLD.rank])


WIDE = torch.bfloat16, torch.float16, torch.float32


def check_scaled_gathers(name: str) -> None:
    shards = [random(2, 8, 32, seed=rank, dtype=E4M3) for rank in range(SIZE)]
    Bs, bias = [random(16, 32, seed=9, dtype=E4M3).t(), random(32, 32, seed=8, dtype=E4M3).t()], random(32, seed=5)
    rows = [random(2, 8, 1, seed=20 + rank, dtype=torch.float32).abs() + 0.5 for rank in range(SIZE)]
    columns = [random(1, b.shape[1], seed=30 + i, dtype=torch.float32).abs() + 0.5 for i, b in enumerate(Bs)]
    one = torch.tensor(0.75)
    for dim, kind in itertools.product((0, 1), WIDE):
        whole, of_whole = torch.cat(shards, dim), torch.cat(rows, dim)
        for of_A, of_Bs in ((rows[WORLD.rank], columns), (of_whole, columns), (one, [one, one])):
            given = shards[WORLD.rank], Bs, of_A, of_Bs, dim, name, [None, bias], [None, None], [kind] * 2
            A, results = IMPLEMENTATIONS["fused_all_gather_scaled_matmul"](*given, [False, False])
            assert torch.equal(A.view(torch.uint8), whole.view(torch.uint8))
            scaled = whole.double() * (of_whole.double() if of_A.numel() > 1 else of_A.double())
            for result, B, of_B, added in zip(results, Bs, of_Bs, (0, bias.double()), strict=True):
                want = scaled @ (B.double() * of_B.double()) + added
                close(result, want.movedim(dim, 0).contiguous().movedim(0, dim).to(kind), want)


def check_scaled_scatters(name: str) -> None:
    A, B = (
        [random(*s, seed=10 * rank + n, dtype=E4M3) for rank in range(SIZE)]
        for n, s in ((1, (4 * SIZE, 32)), (2, (16, 32)))
    )
    rows = [random(4 * SIZE, 1, seed=40 + rank, dtype=torch.float32).abs() + 0.5 for rank in range(SIZE)]
    columns = [random(1, 16, seed=50 + rank, dtype=torch.float32).abs() + 0.5 for rank in range(SIZE)]
    bias, one = random(16, seed=5), torch.tensor(0.5)
    for op, added, by_row, kind in itertools.product(("sum", "avg"), (None, bias), (True, False), WIDE):
        of_A, of_B = (rows, columns) if by_row else ([one] * SIZE, [one] * SIZE)
        mine, shape = WORLD.rank, [1, 4 * SIZE, 16]
        given = A[mine], B[mine].t(), of_A[mine], of_B[mine], op, 1, 0, name, shape, added, None, kind
        got = IMPLEMENTATIONS["fused_scaled_matmul_reduce_scatter"](*given)
        assert shape == [1, 4 * SIZE, 16]
        whole = sum(
            (a.double() * s.double()) @ (b.double().t() * t.double())
            for a, s, b, t in zip(A, of_A, B, of_B, strict=True)
        )
        whole = (whole + (0 if added is None else SIZE * added.double())) / (SIZE if op == "avg" else 1)
        want = whole.chunk(SIZE)[mine][None]
        close(got, want.to(kind), want)


def check_refusals(name: str) -> None:
    """Before any communication, so that PyTorch's implementation can run; the other ranks are not notified."""
    install = theirs._fused_matmul_reduce_scatter
    theirs._fused_matmul_reduce_scatter = lambda *given: "theirs"
    replaced = _or_theirs("fused_matmul_reduce_scatter", IMPLEMENTATIONS["fused_matmul_reduce_scatter"])
    theirs._fused_matmul_reduce_scatter = install
    if WORLD.rank == 0:
        assert replaced(random(4 * SIZE, 32), random(32, 16).int(), "sum", 0, name) == "theirs"
    assert len(WORLD.all_gather(WORLD.rank)) == SIZE
    A, B = random(4 * SIZE, 32), random(32, 17)
    for operator, given in (
        ("fused_all_gather_matmul", (A, [B], 1, name)),
        ("fused_all_gather_matmul", (A, [B, B], 1, name)),
        ("fused_matmul_reduce_scatter", (A, B, "max", 0, name)),
        ("fused_matmul_reduce_scatter", (A, B[:, : SIZE + 1], "sum", 1, name)),
        ("fused_matmul_reduce_scatter", (A[:-1], B, "sum", 0, name)),
        ("fused_all_gather_matmul", (A.int(), [B.int()], 0, name)),
    ):
        try:
            IMPLEMENTATIONS[operator](*given)
        except ArgumentError:
            continue
        raise AssertionError(f"{operator} takes {given}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.group.WORLD.group_name
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(group)
            print(f"passed {name}", flush=True)
    dist.destroy_process_group()
