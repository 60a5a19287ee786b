# SPDX-License-Identifier: MIT
"""Collectives that only move, in a job: all types, and parts of any size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from operators import RANK, SIZE, everyones, run

from tilescale import ops


def check_float8_is_moved():
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = everyones(3, 2 * SIZE, 5, dtype=kind)
        parts = [part.float() for part in x]
        assert torch.equal(ops.all_gather(x[RANK], 1).float(), torch.cat(parts, 1))
        swapped = ops.all_to_all(x[RANK], 1, 0)
        assert swapped.dtype == kind
        assert torch.equal(swapped.float(), torch.cat([part.chunk(SIZE, 1)[RANK] for part in parts]))


def check_bits_and_complex_numbers_are_moved():
    for kind in (torch.bool, torch.complex64, torch.complex128):
        parts = [torch.complex(x, x.flip(0)) for x in everyones(3, 2 * SIZE, 5, dtype=torch.float64)]
        parts = [(x.real > 0) if kind == torch.bool else x.to(kind).conj() for x in parts]
        x, sizes = parts[RANK], [2] * SIZE
        assert torch.equal(ops.all_gather(x, 1), torch.cat(parts, 1))
        out = torch.empty(3 * SIZE, 2 * SIZE, 5, dtype=kind)
        assert ops.all_gather(x, out=out) is out and torch.equal(out, torch.cat(parts))
        mine = [part.chunk(SIZE, 1)[RANK] for part in parts]
        assert torch.equal(ops.all_to_all(x, 1, 0), torch.cat(mine))
        rows = ops.all_to_all_v(x.transpose(0, 1), sizes, sizes)
        assert torch.equal(rows, torch.cat([part.transpose(0, 1) for part in mine]))
    leaf = parts[RANK].detach().clone().requires_grad_()
    ops.all_gather(leaf, 1).abs().pow(2).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * SIZE * leaf.detach())


def check_broadcasts_and_gradients():
    for root in 0, SIZE - 1:
        for kind in (torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2):
            x = [part.mul(9).to(kind) for part in everyones(5, 7, dtype=torch.float32)]
            assert torch.equal(ops.broadcast(x[RANK].t(), root).cfloat(), x[root].t().cfloat())
        large = torch.full((3_000_001,), RANK, dtype=torch.uint8)
        assert (ops.broadcast(large, root) == root).all() and (large == RANK).all()
        leaf = torch.ones(5, 7, requires_grad=True)
        (ops.broadcast(leaf, root) * (RANK + 1)).sum().backward()
        assert (leaf.grad == (sum(range(SIZE + 1)) if RANK == root else 0)).all()


def check_scatters_gathers_and_gradients():
    for root in 0, SIZE - 1:
        for kind in (torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2):
            x = [part.mul(9).to(kind) for part in everyones(3, 2 * SIZE, 5, dtype=torch.float32)]
            part = ops.scatter(x[RANK], root, 1)
            assert part.dtype == kind and torch.equal(part.cfloat(), x[root].cfloat().chunk(SIZE, 1)[RANK])
            whole = ops.gather(x[RANK].mT, root, -1)
            want = torch.cat([each.mT.cfloat() for each in x], -1)
            assert whole.dtype == kind and torch.equal(whole.cfloat(), want if RANK == root else want[..., :0])
        large = torch.arange(3_000_000 * SIZE).add(RANK).to(torch.uint8)
        assert torch.equal(ops.scatter(large, root), large.sub(RANK - root).chunk(SIZE)[RANK])
        assert ops.scatter(torch.ones(0, SIZE), root, 1).shape == (0, 1)
        leaf = torch.ones(5, 2 * SIZE, requires_grad=True)
        (ops.scatter(leaf, root, 1) * (RANK + 1)).sum().backward()
        users = torch.arange(1.0, SIZE + 1).repeat_interleave(2).expand(5, -1)
        assert torch.equal(leaf.grad, users if RANK == root else torch.zeros_like(users))
        leaf = torch.ones(5, 2, requires_grad=True)
        whole = ops.gather(leaf, root, 1)
        (whole * users[:, : whole.shape[1]]).sum().backward()
        assert (leaf.grad == RANK + 1).all()


def check_unequal_parts():
    counts = torch.randint(0, 5, (SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    counts[0, 1] = 0
    rows = [x[: int(counts[rank].sum())] for rank, x in enumerate(everyones(5 * SIZE, 3, 5, dtype=torch.float32))]
    want = torch.cat([x.split(counts[rank].tolist())[RANK] for rank, x in enumerate(rows)])
    users = torch.arange(1.0, SIZE + 1).repeat_interleave(counts[RANK])[:, None, None].expand_as(rows[RANK])

    def on_host(x: torch.Tensor) -> torch.Tensor:
        return ops.all_to_all_v(x, counts[RANK].tolist(), counts[:, RANK].tolist())

    def on_device(x: torch.Tensor) -> torch.Tensor:
        got, received = ops.all_to_all_v(x, counts[RANK], most=5)
        assert torch.equal(received.long(), counts[:, RANK])
        return got[: len(want)]

    def learned(sizes: Any, x: torch.Tensor) -> torch.Tensor:
        got, received = ops.all_to_all_v(x, sizes)
        assert torch.equal(received.long(), counts[:, RANK])
        return got

    for call in (on_host, on_device, partial(learned, counts[RANK]), partial(learned, counts[RANK].tolist())):
        leaf = rows[RANK].clone().requires_grad_()
        got = call(leaf)
        assert torch.equal(got.detach(), want)
        (got * (RANK + 1)).sum().backward()
        assert torch.equal(leaf.grad, users)
    narrow = ops.all_to_all_v(rows[RANK].to(torch.float8_e5m2), counts[RANK].tolist(), counts[:, RANK].tolist(), most=5)
    assert torch.equal(narrow.float(), want.to(torch.float8_e5m2).float())


def check_unequal_gathers_and_gradients():
    for sizes in [3, 0, 5], [0, 0, 0], [1, 1, 1]:
        rows = [x[:n] for x, n in zip(everyones(5, 3, dtype=torch.float32), sizes, strict=False)]
        leaf = rows[RANK].clone().requires_grad_()
        got, counts = ops.all_gather_v(leaf)
        assert torch.equal(got.detach(), torch.cat(rows)) and counts.tolist() == sizes[:SIZE]
        (got * (RANK + 1)).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, sum(range(SIZE + 1))))
        for kind in (torch.bool, torch.float8_e5m2, torch.complex64):
            assert torch.equal(ops.all_gather_v(rows[RANK].to(kind))[0].cfloat(), torch.cat(rows).to(kind).cfloat())


def check_gathers_with_room():
    for sizes, most in (([3, 0], 4), ([0, 0], 1), ([2, 5], 5)):
        rows = [x[:n] for x, n in zip(everyones(5, 3, dtype=torch.float32), sizes, strict=False)]
        want = torch.cat(rows)
        spare = torch.cat([rows[RANK], torch.full((most - len(rows[RANK]), 3), torch.nan)])
        for given, number in ((rows[RANK], None), (spare, torch.tensor(sizes[RANK]))):
            leaf = given.clone().requires_grad_()
            got, counts = ops.all_gather_v(leaf, number, most=most)
            assert got.shape == (SIZE * most, 3) and counts.tolist() == sizes[:SIZE]
            assert torch.equal(got[: len(want)].detach(), want) and not got[len(want) :].any()
            (got * (RANK + 1)).sum().backward()
            users = torch.zeros_like(leaf)
            users[: len(rows[RANK])] = sum(range(SIZE + 1))
            assert torch.equal(leaf.grad, users)
        assert torch.equal(ops.all_gather_v(spare, torch.tensor(sizes[RANK]))[0], want)
        for kind in (torch.bool, torch.float8_e5m2, torch.complex64):
            got, _ = ops.all_gather_v(rows[RANK].to(kind), most=most)
            assert got.dtype == kind and torch.equal(got[: len(want)].cfloat(), want.to(kind).cfloat())


if __name__ == "__main__":
    run({name: value for name, value in globals().items() if name != "run"})
