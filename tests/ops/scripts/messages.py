# SPDX-License-Identifier: MIT
"""Messages between ranks, in a job of any size: batches, single ones, and borders of blocks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from operators import RANK, SIZE, WORLD, run
from torch.distributed.device_mesh import init_device_mesh

from tilescale import ops
from tilescale.errors import RankMismatchError

KINDS = torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2


def message(source: int, to: int, number: int) -> torch.Tensor:
    """One of those that a rank sends to another: of any type and shape, some without elements."""
    shape = (source + number) % 3, 1 + to + 2 * number
    values = torch.arange(shape[0] * shape[1]).view(shape) + source
    return values.to(KINDS[(source + 3 * to + number) % len(KINDS)])


def check_batches_of_any_order():
    ranks = range(SIZE)
    every = [(s, t, n) for s, t in itertools.product(ranks, ranks) for n in range((s + 2 * t) % 3)]
    sends = [ops.Send(message(s, t, n), t) for s, t, n in every if s == RANK]
    wanted = [message(s, t, n) for s, t, n in every if t == RANK]
    receives = [ops.Recv(torch.empty_like(message(s, t, n)), s) for s, t, n in every if t == RANK]
    for seed in range(3):
        order = random.Random(seed + RANK).sample(range(len(sends) + len(receives)), len(sends) + len(receives))
        in_order = iter(sends), iter(receives)
        mixed = [next(in_order[place >= len(sends)]) for place in order]  # as listed between two ranks
        for got, want in zip(ops.batch_send_recv(mixed), wanted, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.cfloat(), want.cfloat())
    assert ops.batch_send_recv([]) == []


def check_gradients_of_a_batch_go_back():
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    leaf = torch.full((5, 3), float(RANK), requires_grad=True)
    calls = [ops.batch_send_recv]
    if SIZE == 2:  # to load the compiler takes each rank seconds
        calls.append(torch.compile(ops.batch_send_recv, fullgraph=True, backend="aot_eager"))
    for call in calls:
        leaf.grad = None
        one, other = call(
            [ops.Send(leaf.mT, after), ops.Send(leaf[1], before)]
            + [ops.Recv(torch.empty(3, 5), before), ops.Recv(torch.empty(3), after)]
        )
        assert (one == before).all() and (other == after).all()
        ((one + 10 * other[:, None]) * (RANK + 1)).sum().backward()
        want = torch.full((5, 3), after + 1.0)
        want[1] += 50 * (before + 1)
        assert torch.equal(leaf.grad, want)


def check_messages_that_do_not_meet_are_refused():
    if SIZE > 1:
        with pytest.raises(
            RankMismatchError, match="rank 0 of the group sends 3 of torch.int64 to rank 1, which receives"
        ):
            ops.batch_send_recv([[ops.Send(torch.arange(3), 1)], [ops.Recv(torch.empty(3), 0)], *[[]] * SIZE][RANK])


def check_single_messages_of_two_ranks():
    x = torch.arange(7, dtype=torch.bfloat16)
    for source in range(SIZE - 1):  # along the line: other ranks are independent
        if source == RANK:
            ops.send(x + source, RANK + 1)
        elif source + 1 == RANK:
            assert torch.equal(ops.recv(x, source), x + source)


def check_borders_of_a_line_of_blocks():
    for periodic, width, dim, in_place in itertools.product((False, True), (1, 2), (0, 1), (False, True)):
        if SIZE > 3 and (width, dim) != (2, 1):
            continue
        blocks = torch.arange(24.0 * SIZE).view(SIZE, 4, 6)
        line = torch.cat(list(blocks), dim)
        zeros = torch.zeros_like(line.narrow(dim, 0, width))
        low, high = (line.narrow(dim, begin, width) for begin in (0, line.shape[dim] - width))
        whole = torch.cat([high, line, low] if periodic else [zeros, line, zeros], dim)
        extent = blocks.shape[1 + dim]
        want = whole.narrow(dim, RANK * extent, extent + 2 * width)
        given = blocks[RANK]
        if in_place:
            given = torch.zeros_like(want)
            given.narrow(dim, width, extent).copy_(blocks[RANK])
        made = ops.halo_exchange(given, width, dim, periodic=periodic, in_place=in_place)
        assert torch.equal(made, want) and (made is given) == in_place


def check_gradients_of_borders_go_back():
    leaf = torch.zeros(4, 3, requires_grad=True)
    (ops.halo_exchange(leaf, 1, periodic=True) * (RANK + 1)).sum().backward()
    want = torch.full((4, 3), RANK + 1.0)
    want[0] += (RANK - 1) % SIZE + 1
    want[3] += (RANK + 1) % SIZE + 1
    assert torch.equal(leaf.grad, want)


def check_borders_of_a_mesh_and_their_corners():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=WORLD.store, rank=RANK, world_size=SIZE)
    rows = 2 if SIZE % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (rows, SIZE // rows), mesh_dim_names=("y", "x"))
    y, x = mesh.get_coordinate()
    whole = torch.arange(rows * 3 * (SIZE // rows) * 4).view(rows * 3, -1)
    block = whole.chunk(rows)[y].chunk(SIZE // rows, 1)[x]
    around = torch.nn.functional.pad(whole[None].float(), (2, 2, 0, 0), mode="circular")[0]
    around = torch.nn.functional.pad(around, (0, 0, 1, 1))
    want = around[y * 3 : y * 3 + 5, x * 4 : x * 4 + 8].long()
    assert torch.equal(ops.halo_exchange(block, (1, 2), (0, 1), periodic=(False, True), group=mesh), want)


if __name__ == "__main__":
    run({name: value for name, value in globals().items() if name != "run"})
