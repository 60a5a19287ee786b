# SPDX-License-Identifier: MIT
"""Float8 GEMMs on GPUs, and quantization of their operands: `torchrun --nproc-per-node 2 tests/gpu/float8_check.py`.

Arguments are as for `ops_check.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import compare, main, poison, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, as_first, everyones, total  # noqa: E402
from tests.ops.roundings import as_it_lies, by_pytorch, of_many_magnitudes, same  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops.rounding import rounded_rows, rounded_squares  # noqa: E402


def check_float8(_: slice) -> None:
    """Scales of rows and of columns; from few rows to many, with different strategies: the last ones persistent."""
    for rows, n, k in [(8, 256, 512), (300, 512, 1024), (1536, 3584, 1024), (2047, 8192, 512), (4096, 2064, 512)]:
        whole, weight = random(SIZE * rows, k).to(torch.float8_e4m3fn), random(n, k).to(torch.float8_e4m3fn)
        of_rows, of_columns = torch.rand(SIZE * rows, device=DEVICE) + 0.5, torch.rand(n, device=DEVICE) + 0.5
        of_columns = as_first(of_columns)
        a, of_a = whole[:rows], of_rows[:rows]
        gathered = everyones(a).view(-1, k).float() * everyones(of_a).view(-1, 1)
        want = gathered @ (weight.float() * of_columns[:, None]).t()
        runs(
            f"all_gather_matmul {SIZE * rows}x{n}x{k} of float8",
            lambda a=a, w=weight, by=(of_a, of_columns): ops.all_gather_matmul(a, w.t(), scales=by),
            lambda c, want=want: compare("gather of float8", c, want),
        )
        mine = (whole.float() * of_rows[:, None]) @ (weight.float() * of_columns[:, None]).t()
        # Tensor cores add up float8 in fewer bits, relative to the parts.
        everything = total(mine), total(mine.abs())
        part = [x.chunk(SIZE)[RANK] for x in everything]
        runs(
            f"matmul_reduce_scatter {SIZE * rows}x{n}x{k} of float8",
            lambda a=whole, w=weight, by=(of_rows, of_columns): ops.matmul_reduce_scatter(a, w.t(), scales=by),
            lambda c, want=part: compare("scatter of float8", c, *want),
        )
        runs(
            f"matmul_all_reduce {SIZE * rows}x{n}x{k} of float8",
            lambda a=whole, w=weight, by=(of_rows, of_columns): ops.matmul_all_reduce(a, w.t(), scales=by),
            lambda c, want=everything: compare("sum of float8", c, *want),
        )


def check_block_scales(only: slice) -> None:
    """One for each 128 numbers of a row, and for each 128 x 128 of b; different strategies, tails, and two weights."""
    shapes = [(8, 256, 512), (300, 528, 1040), (1536, 3584, 1024), (2047, 8192, 512), (4096, 2064, 512)]
    for rows, n, k in shapes[only]:
        multiply_with_block_scales(rows, n, k)


def multiply_with_block_scales(rows: int, n: int, k: int) -> None:
    """The operators of matrices of that shape on each rank."""
    whole, weight = random(SIZE * rows, k).to(torch.float8_e4m3fn), random(n, k).to(torch.float8_e4m3fn).t()
    of_rows = torch.rand(SIZE * rows, -(-k // 128), device=DEVICE) + 0.5
    squares = as_first(torch.rand(-(-n // 128), -(-k // 128), device=DEVICE) + 0.5)
    plain = weight.float() * squares.t().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    scaled = whole.float() * of_rows.repeat_interleave(128, 1)[:, :k]
    gathered = everyones(scaled[:rows].contiguous()).view(-1, k) @ plain
    a, of_b, parts, title = whole[:rows], squares.t(), total(scaled @ plain), f"{SIZE * rows}x{n}x{k} of blocks"
    both, by = [weight, weight], (of_rows[:rows], [of_b, of_b])
    runs(
        f"all_gather_matmul {title}",
        lambda: ops.all_gather_matmul(a, weight, scales=(of_rows[:rows], of_b)),
        lambda c: compare("gather", c, gathered),
    )
    runs(
        f"gated all_gather_matmul {title}",
        lambda: ops.all_gather_matmul(a, both, scales=by, activation="relu", gated=True),
        lambda c: compare("gated", c, torch.relu(gathered) * gathered),
    )
    runs(
        f"matmul_reduce_scatter {title}",
        lambda: ops.matmul_reduce_scatter(whole, weight, scales=(of_rows, of_b)),
        lambda c: compare("scatter", c, parts.chunk(SIZE)[RANK]),
    )
    runs(
        f"matmul_all_reduce {title}",
        lambda: ops.matmul_all_reduce(whole, weight, scales=(of_rows, of_b)),
        lambda c: compare("sum", c, parts),
    )


def check_rounding(_: slice) -> None:
    """Quantized rows and tiles, bit for bit as by PyTorch; with tails, and rows that several warps share."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for rows, columns, kind in [(70, 48, e4m3), (300, 4112, e5m2), (1024, 7168, e4m3)]:
        x = of_many_magnitudes(rows, columns).to(DEVICE)
        for how in ("contiguous", "across"):
            for scaling in ("rowwise", "tensorwise"):
                if not same(rounded_rows(as_it_lies(x, how), kind, scaling), by_pytorch(x, kind, scaling)):
                    raise ValueError(f"{rows}x{columns}, {how}, {kind}, {scaling} has other bits than by PyTorch")
        x[rows // 2, columns // 2] = torch.inf
        made, scales = rounded_rows(x, kind, "rowwise")
        if not bool(made[rows // 2].float().isnan().all()) or int(scales.isnan().sum()) != 1:
            raise ValueError(f"{rows}x{columns} hides infinity")
    for rows, columns, kind in [(256, 384, e4m3), (4096, 7168, e5m2)]:
        x = of_many_magnitudes(rows, columns).to(DEVICE)
        squares = x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2).flatten(0, 1)
        want, scales = rounded_rows(squares.contiguous(), kind, "rowwise")
        want = want.view(rows // 128, columns // 128, 128, 128).view(torch.uint8).transpose(1, 2).reshape(rows, columns)
        for how in ("contiguous", "across"):
            got, of_squares = rounded_squares(as_it_lies(x, how), kind)
            if not torch.equal(got.view(torch.uint8), want) or not torch.equal(of_squares.view(-1), scales):
                raise ValueError(f"squares of {rows}x{columns}, {how}, {kind} have other bits than rows")
    wide = of_many_magnitudes(3, 40000).to(DEVICE)
    if not same(rounded_rows(wide, e4m3, "rowwise"), by_pytorch(wide, e4m3, "rowwise")):
        raise ValueError("rows of 40000 have other bits than by PyTorch")
    say("PASS rounding")


def check_float8_gradients(only: slice) -> None:
    """GEMMs of bfloat16 matrices that are quantized before; the second shape is overlapped."""
    for rows, n, k in [(200, 256, 512), (2304, 1024, 4096)][only]:
        a, up, down = random(rows, k), random(n, k).mul_(0.1), random(k, n).mul_(0.1)
        grad, whole = random(rows, k), everyones(a).view(-1, k).float()
        hidden = whole @ up.float().t()
        far = everyones(grad).view(-1, k).float()
        of_hidden = far @ down.float()
        for recipe in (ops.Float8(), ops.Float8("tensorwise", torch.float8_e4m3fn), ops.Float8("blockwise")):
            leaves = [x.clone().requires_grad_() for x in (a, up, down)]
            poison()
            middle = ops.all_gather_matmul(leaves[0], leaves[1].t(), float8=recipe)
            y = ops.matmul_reduce_scatter(middle, leaves[2].t(), float8=recipe)
            dy, d_up, d_down = torch.autograd.grad(y, leaves, grad)
            for name, got, want, most in (
                ("hidden", middle, hidden, 0.06),
                ("y", y, total(hidden @ down.float().t()).chunk(SIZE)[RANK], 0.09),
                ("da", dy, total(of_hidden @ up.float()).chunk(SIZE)[RANK], 0.15),
                ("d_down", d_down, far.t() @ hidden, 0.06),
                ("d_up", d_up, of_hidden.t() @ whole, 0.12),
            ):
                error = float((got.detach().float() - want).norm() / want.norm())
                say(f"float8 {rows}x{n}x{k} {recipe.scaling} {name}: {error:.4f} of the norm")
                if not error < most:
                    raise ValueError(f"{name} is off by {error:.3f} of its norm")
            poison()
            summed = ops.matmul_all_reduce(leaves[0], leaves[1].t(), float8=recipe)
            error = float((summed.detach().float() - (want := total(a.float() @ up.float().t()))).norm() / want.norm())
            if not error < 0.06:
                raise ValueError(f"the sum is off by {error:.3f} of its norm")
        say(f"PASS gradients of float8 {rows}x{n}x{k}")


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
