# SPDX-License-Identifier: MIT
"""Results of operators in a job: of any shape and type, changed in place, and written to `out=`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from operators import RANK, SIZE, close, everyones, run

import tilescale
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import ag_gemm, strategy


def check_matmul_all_reduce_of_batches():
    a, b, bias = everyones(2, 3, 4, 24), everyones(16, 24, seed=1), everyones(16, seed=2)[0]
    x = a[RANK].clone().requires_grad_()
    got = ops.matmul_all_reduce(x, b[RANK].t(), bias=bias)
    close(got.detach(), sum(x.float() @ w.float().t() for x, w in zip(a, b, strict=True)) + bias.float())
    got.sum().backward()
    close(x.grad, b[RANK].float().sum(0).expand(2, 3, 4, 24))


def check_results_are_written_where_they_are_wanted():
    for x in (everyones(2 * SIZE, 3, 8), everyones(2 * SIZE, 5)):  # whole bulk copies, and padded ones
        mine = x[RANK]
        for call in (ops.all_reduce, ops.all_gather, partial(ops.all_gather, dim=1), ops.reduce_scatter):
            want = call(mine)
            for place in (torch.empty_like(want), torch.empty(want.numel() + 1).to(want.dtype)[1:].view(want.shape)):
                assert call(mine, out=place) is place and torch.equal(place, want)
        own = mine.clone()
        assert torch.equal(ops.all_reduce(own, out=own), ops.all_reduce(mine))
        narrow = mine.to(torch.float8_e4m3fn)
        got = ops.all_gather(narrow, out=torch.empty(SIZE * len(narrow), *narrow.shape[1:]).to(narrow.dtype))
        assert torch.equal(got.float(), ops.all_gather(narrow).float())
    for wrong, said in (
        (lambda: ops.all_reduce(mine, out=mine[:1]), "out has shape"),
        (lambda: ops.all_gather(mine, out=mine.float()), "out is torch.float32"),
        (lambda: ops.reduce_scatter(mine.clone().requires_grad_(), out=mine.chunk(SIZE)[0]), "gradients are recorded"),
    ):
        with pytest.raises(ArgumentError, match=said):
            wrong()


def check_numbers_that_travel_as_float8():
    for shape in ((SIZE, 300), (0, SIZE)):
        x = everyones(*shape)
        mine, want = x[RANK], sum(each.double() for each in x)
        for call, exact in (
            (ops.all_reduce, want),
            (ops.reduce_scatter, want.chunk(SIZE)[RANK] if shape[0] else want),
            (partial(ops.all_gather, dim=1), torch.cat(x, 1).double()),
        ):
            got = call(mine, wire="float8_e4m3fn")
            assert got.dtype == mine.dtype and got.shape == exact.shape and got.is_contiguous()
            torch.testing.assert_close(got.double(), exact, rtol=1 / 7, atol=0.3)
            assert call(mine, wire="float8_e4m3fn", out=(place := torch.empty_like(got))) is place
            assert torch.equal(place, got)
    leaf = everyones(SIZE, 40)[RANK].requires_grad_()
    for call in (ops.all_reduce, ops.all_gather, ops.reduce_scatter):
        leaf.grad = None
        (call(leaf, wire="float8_e4m3fn") * (RANK + 1)).sum().backward()
        users = torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, 40)
        assert torch.equal(
            leaf.grad.float(), users if call is ops.reduce_scatter else torch.full_like(users, sum(range(SIZE + 1)))
        )


def check_lines_of_float8_are_the_same_over_any_network():
    """By one kernel over NVLink; as bytes over PCIe, and between nodes."""
    with TemporaryDirectory() as folder:
        nodes = Path(folder, "nodes.yaml")
        nodes.write_text(f"extends: h200-sxm-8x4\nlevels:\n  node:\n    count: {SIZE}\n  device:\n    count: 1\n")
        others = [tilescale.Machine.load(name) for name in ("rtx4090-pcie-2", str(nodes))]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = (everyones(3 * SIZE, 125)[RANK].float() * torch.logspace(-6, 4, 125)).to(dtype)
        x[1, 7], x[2, 3] = torch.finfo(dtype).max, torch.nan
        for call in (ops.all_reduce, ops.reduce_scatter, ops.all_gather, partial(ops.all_gather, dim=1)):
            want = call(x, wire="float8_e4m3fn")
            assert not want.isnan().all()
            for machine in others:
                with tilescale.use_machine(machine):
                    got = call(x, wire="float8_e4m3fn")
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def check_gemms_write_where_they_are_wanted():
    """Of whole bulk copies and of others, into contiguous memory and between other columns, compiled too."""
    for n in (16, 12):
        a, b, bias = everyones(4 * SIZE, 24)[RANK], everyones(24, n, seed=1)[RANK], everyones(n, seed=2)[0]
        narrow = a[:, :16].to(torch.float8_e4m3fn), b.t()[:, :16].to(torch.float8_e4m3fn).contiguous().t()
        for call in (
            lambda **how: ops.all_gather_matmul(a, b, bias=bias, **how),  # noqa: B023 - called at once
            lambda **how: ops.all_gather_matmul(a, [b, b], gated=True, activation="silu", **how),  # noqa: B023
            lambda **how: ops.matmul_reduce_scatter(a, b, bias=bias, **how),  # noqa: B023
            lambda **how: ops.matmul_all_reduce(a, b, **how),  # noqa: B023
            lambda **how: ops.matmul_all_reduce(a.view(2, -1, 24), b, bias=bias, **how),  # noqa: B023
            lambda **how: ops.matmul_all_reduce(*narrow, scales=(torch.ones(1), torch.ones(1)), **how),  # noqa: B023
            lambda **how: ops.matmul_reduce_scatter(a, b, float8=ops.Float8(), **how),  # noqa: B023
        ):
            want = call()
            for place in (torch.empty_like(want), want.new_empty(*want.shape[:-1], n + 3)[..., 2:-1]):
                assert call(out=place) is place and torch.equal(place, want)
        several = ops.all_gather_matmul(a, [b, b[:, :8]])
        places = [torch.empty_like(x) for x in several]
        made, gathered = ops.all_gather_matmul(a, [b, b[:, :8]], out=places, return_gathered=True)
        assert made[0] is places[0] and made[1] is places[1] and torch.equal(gathered, ops.all_gather(a))
        assert all(map(torch.equal, places, several))
        compiled = torch.compile(lambda x, y, out: ops.matmul_all_reduce(x, y, out=out), backend="aot_eager")
        assert torch.equal(compiled(a, b, torch.empty(len(a), n).bfloat16()), ops.matmul_all_reduce(a, b))
    for wrong, said in (
        (lambda: ops.all_gather_matmul(a, b, out=a), "out has shape"),
        (lambda: ops.all_gather_matmul(a, [b, b], out=places[0]), "b is 2 matrices, out 1"),
        (lambda: ops.all_gather_matmul(a, [b], out=[None]), r"out\[0\] is NoneType"),
        (lambda: ops.matmul_all_reduce(a, b, out=a.float()), "out is torch.float32"),
        (lambda: ops.matmul_reduce_scatter(a, b.clone().requires_grad_(), out=a[:4, :n]), "gradients are recorded"),
    ):
        with pytest.raises(ArgumentError, match=said):
            wrong()


def check_gemms_of_float32_write_where_they_are_wanted():
    a, b = everyones(4 * SIZE, 24)[RANK].float(), everyones(24, 12, seed=1)[RANK].float()
    for call in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        want = call(a, b)
        for place in (torch.empty_like(want), torch.empty_like(want.t()).t()):
            assert call(a, b, out=place) is place and torch.equal(place, want)
        with pytest.raises(ArgumentError, match="out is torch.bfloat16"):
            call(a, b, out=want.bfloat16())


def check_weights_that_lie_side_by_side():
    """They have one grid, if they lie so; their results do not share memory."""
    kernels, kernel, by_estimate = [], ag_gemm._kernel, strategy._overlaps
    strategy._overlaps = lambda machine, job, ranks: True
    ag_gemm._kernel = lambda *given: kernels.append(given) or kernel(*given)
    a, grads, widths = everyones(5, 16), everyones(5 * SIZE, 512, seed=3), [128, 256, 128]
    for b, grids in ((everyones(512, 16, seed=1), 1), (everyones(512, 24, seed=1), 3)):
        leaf, whole, bias = (x[RANK].clone().requires_grad_() for x in (a, b, everyones(512, seed=2)))
        weights = whole[:, :16].split(widths)  # of the second matrix rows lie apart
        results = ops.all_gather_matmul(leaf, [w.t() for w in weights], bias=list(bias.split(widths)))
        assert len(kernels) == grids, len(kernels)
        kernels.clear()
        assert len({x.untyped_storage().data_ptr() for x in results}) == 3 and all(x.is_contiguous() for x in results)
        want = torch.cat(a).float() @ b[RANK][:, :16].float().t() + bias.detach().float()
        close(torch.cat(results, 1).detach(), want)
        torch.autograd.backward(results, grads[RANK].split(widths, 1))
        far = sum(g.float() @ w[:, :16].float() for g, w in zip(grads, b, strict=True)).chunk(SIZE)[RANK]
        close(leaf.grad, far)
        close(whole.grad[:, :16], grads[RANK].float().t() @ torch.cat(a).float())
        kernels.clear()
    ag_gemm._kernel, strategy._overlaps = kernel, by_estimate


def check_results_are_changed_in_place():
    """Views are rejected by autograd, also in differentiated code."""
    x, b = everyones(2 * SIZE, 16), everyones(16, 16, seed=1)
    for call in (
        ops.all_reduce,
        ops.all_gather,
        ops.reduce_scatter,
        ops.all_to_all,
        lambda a: ops.all_gather_matmul(a, [b[RANK], b[RANK]])[0],
        lambda a: ops.matmul_reduce_scatter(a, b[RANK]),
        lambda a: ops.matmul_all_reduce(a, b[RANK]),
    ):
        leaf = x[RANK].clone().requires_grad_()
        got = call(leaf)
        want = got.detach().clone() + 1
        got.add_(1)
        assert torch.equal(got, want)
        got.sum().backward()
        assert leaf.grad is not None


def check_float32_products():
    """As exact as PyTorch's: its GEMM, before or after our collective."""
    a, b, bias = (
        everyones(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((4 * SIZE, 24), (24, 16), (16,)))
    )
    total = sum(x @ y for x, y in zip(a, b, strict=True)) + bias[0]
    for got, want in (
        (ops.all_gather_matmul(a[RANK], b[RANK], bias=bias[RANK]), torch.cat(a) @ b[RANK] + bias[RANK]),
        (ops.matmul_reduce_scatter(a[RANK], b[RANK], bias=bias[0]), total.chunk(SIZE)[RANK]),
        (ops.matmul_all_reduce(a[RANK], b[RANK], bias=bias[0]), total),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_columns_are_gathered_before_and_after_gemms():
    """Of parts of the inner dimension that programs take, and of others; gradients, compiled too."""
    for k, n, dtype in ((64, 24, torch.bfloat16), (20, 9, torch.float16), (64, 16, torch.float32)):
        a, b = everyones(6, k, dtype=dtype), everyones(n, SIZE * k, seed=1, dtype=dtype)
        bias, grad = everyones(n, seed=2, dtype=dtype), everyones(6, n, seed=3, dtype=dtype)
        leaf, weight, added = (x[RANK].clone().requires_grad_() for x in (a, b, bias))
        got = ops.all_gather_columns_matmul(leaf, weight.t(), bias=added)
        whole = torch.cat(a, 1).float()
        close(got.detach(), whole @ b[RANK].float().t() + bias[RANK].float())
        got.backward(grad[RANK])
        close(leaf.grad, sum(g.float() @ w.float() for g, w in zip(grad, b, strict=True)).chunk(SIZE, 1)[RANK])
        close(weight.grad, grad[RANK].float().t() @ whole)
        close(added.grad, grad[RANK].float().sum(0))

        x, w = everyones(6, k, dtype=dtype)[0], everyones(n, k, seed=1, dtype=dtype)
        grad = everyones(6, SIZE * n, seed=4, dtype=dtype)
        leaf, weight, added = (t.clone().requires_grad_() for t in (x, w[RANK], bias[RANK]))
        got = ops.matmul_all_gather(leaf, weight.t(), bias=added)
        close(got.detach(), torch.cat([x.float() @ y.float().t() + z.float() for y, z in zip(w, bias, strict=True)], 1))
        got.backward(grad[RANK])
        own = sum(g.float() for g in grad).chunk(SIZE, 1)[RANK]
        close(leaf.grad, own @ w[RANK].float())
        close(weight.grad, own.t() @ x.float())
        close(added.grad, own.sum(0))
        both = lambda a, b, c, d: (ops.all_gather_columns_matmul(a, b), ops.matmul_all_gather(c, d))  # noqa: E731
        compiled = torch.compile(both, backend="aot_eager")
        with torch.no_grad():
            made = compiled(a[RANK], b[RANK].t(), x, w[RANK].t())
        close(made[0], whole @ b[RANK].float().t())
        close(made[1], torch.cat([x.float() @ y.float().t() for y in w], 1))


if __name__ == "__main__":
    run({name: value for name, value in globals().items() if name != "run"})
