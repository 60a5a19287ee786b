# SPDX-License-Identifier: MIT
"""All-reduces with a residual and a norm, in a job: gradients, results in given memory, and rows in float8."""

from __future__ import annotations

import torch
from operators import RANK, SIZE, close, everyones, run

from tilescale import ops


def same_with_gradients(results, want, leaves, plain):
    """Compare results and gradients with PyTorch's; `plain` has the inputs of all ranks first, then those of each."""
    for got, right in zip(results, want, strict=True):
        close(got.detach(), right.detach())
    sum(t.float().pow(2).sum() for t in results).backward()
    sum(t.pow(2).sum() for t in want).backward()
    close(leaves[0].grad, SIZE * plain[0].grad[RANK])  # every rank's result is a use of it
    for leaf, right in zip(leaves[1:], plain[1:], strict=True):
        close(leaf.grad, right.grad)


def check_all_reduce_rms_norm_and_gradients():
    x, residual, weight = everyones(5, 40), everyones(5, 40, seed=1)[0], everyones(40, seed=2)[0]
    leaves = [t.clone().requires_grad_() for t in (x[RANK], weight, residual)]
    plain = [t.float().requires_grad_() for t in (torch.stack(x), weight, residual)]
    results, total = ops.all_reduce_rms_norm(*leaves, eps=1e-3), plain[0].sum(0) + plain[2]
    want = total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + 1e-3) * plain[1], total
    same_with_gradients(results, want, leaves, plain)


def check_all_reduce_layer_norm_and_gradients():
    x, residual, (weight, bias) = everyones(5, 40), everyones(5, 40, seed=1)[0], everyones(2, 40, seed=2)[0]
    leaves = [t.clone().requires_grad_() for t in (x[RANK], weight, bias, residual)]
    plain = [t.float().requires_grad_() for t in (torch.stack(x), weight, bias, residual)]
    results, total = ops.all_reduce_layer_norm(*leaves, eps=1e-3), plain[0].sum(0) + plain[3]
    want = torch.nn.functional.layer_norm(total, (40,), plain[1], plain[2], 1e-3), total
    same_with_gradients(results, want, leaves, plain)
    into = torch.empty_like(residual), residual.clone()
    assert ops.all_reduce_layer_norm(x[RANK], weight, residual=into[1], out=into)[0] is into[0]
    close(into[0], torch.nn.functional.layer_norm(total, (40,), plain[1], None, 1e-5).detach())


def check_all_reduce_rms_norm_into_given_memory():
    """New, in place of the inputs, with gaps, and for no rows."""
    x, residual, weight = everyones(5, 40), everyones(5, 40, seed=1)[0], everyones(40, seed=2)[0]
    want = ops.all_reduce_rms_norm(x[RANK], weight, residual)
    wide = torch.full((5, 80), torch.nan, dtype=weight.dtype)
    for given in (torch.empty_like(residual), None), (x[RANK].clone(), residual.clone()), (wide[:, ::2], wide[:, 1::2]):
        read = given if given[1] is not None and given[0].is_contiguous() else (x[RANK], residual)
        made = ops.all_reduce_rms_norm(read[0], weight, read[1], out=given)
        for got, right, place in zip(made, want, given, strict=True):
            assert torch.equal(got, right) and (place is None or got is place)
    alone, same = ops.all_reduce_rms_norm(x[RANK], weight), ops.all_reduce_rms_norm(x[RANK], weight, 0 * residual)
    assert all(map(torch.equal, alone, same))
    quantized = ops.all_reduce_rms_norm_float8(x[RANK], weight, return_normed=False)
    assert len(quantized) == 3 and torch.equal(quantized[2], same[1])
    none = x[RANK][:0]
    assert ops.all_reduce_rms_norm(none, weight, out=(none, None))[0] is none
    want = ops.all_reduce_rms_norm_float8(x[RANK], weight, residual, return_normed=True)
    given = [torch.zeros_like(made) for made in want[:2]] + [residual, x[RANK]]
    made = ops.all_reduce_rms_norm_float8(x[RANK], weight, residual, return_normed=True, out=given)
    for got, right, place in zip(made, want, given, strict=True):
        assert got is place and torch.equal(got.view(torch.uint8), right.view(torch.uint8))


def check_all_reduce_rms_norm_float8():
    x, residual, weight = everyones(5, 40), everyones(5, 40, seed=1)[0], everyones(40, seed=2)[0]
    normed, y = ops.all_reduce_rms_norm(x[RANK], weight, residual, weight_offset=1.0)
    for options in ({}, {"group_size": 128, "power_of_two": True}, {"scale": torch.tensor([0.02])}):
        options["weight_offset"] = 1.0
        made = ops.all_reduce_rms_norm_float8(x[RANK], weight, residual, return_normed=True, **options)
        quantized, scales, total, rows = made
        assert torch.equal(total, y) and torch.equal(rows, normed) and quantized.dtype is torch.float8_e4m3fn
        error = (quantized.double() * scales.double() - normed.double()).abs()
        assert (error <= 2**-4 * 1.1 * normed.double().abs() + 0.02 * scales.double()).all()
        assert len(ops.all_reduce_rms_norm_float8(x[RANK], weight, residual, **options)) == 3


def check_packed_scales():
    """As rows, in new memory and in that of the caller, which is written where words of adjacent rows are adjacent."""
    x, weight = everyones(5, 640), everyones(640, seed=2)[0]
    q, powers, *_ = ops.all_reduce_rms_norm_float8(x[RANK], weight, group_size=128, power_of_two=True)
    exponents = torch.zeros(5, 8, dtype=torch.uint8)
    exponents[:, :5] = (powers.log2() + 127).to(torch.uint8)
    want = exponents.view(torch.int32)
    column_major = torch.full((16,), -1, dtype=torch.int32)
    places = None, column_major[:13].as_strided((5, 2), (1, 8)), torch.zeros(5, 2, dtype=torch.int32)
    for place in places:
        out = None if place is None else (None, place, None)
        quantized, scales, _ = ops.all_reduce_rms_norm_float8(x[RANK], weight, group_size=128, packed=True, out=out)
        assert place is None or scales is place
        assert torch.equal(scales, want) and torch.equal(quantized.view(torch.uint8), q.view(torch.uint8))
    assert (column_major[13:] == -1).all()
    halves, words = ops.all_reduce_rms_norm_float8(x[RANK].view(1, 5, 640), weight, group_size=128, packed=True)[:2]
    assert halves.shape == (1, 5, 640) and torch.equal(words, want[None]) and words.stride()[1:] == (1, 8)


if __name__ == "__main__":
    run(dict(globals()))
