# SPDX-License-Identifier: MIT
"""Programs with atomic additions at peers, waits for several flags, and threads that act for their unit.

Results are checked for all ranks together: `check` gets the arguments of each, in the order of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T

BLOCKS, ROWS, COLUMNS, BINS = 4, 64, 32, 4
KINDS = ("int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64")
Ranks = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A program for any number of devices, a rank's arguments (data, then zeros), and the expected result."""

    make: Callable[[int], Any]
    tensors: Callable[[int, int], list[torch.Tensor]]
    check: Callable[[list[list[torch.Tensor]]], None]


def data(rank: int, *shape: int, low: int = -5, high: int = 6) -> torch.Tensor:
    """Small integers, other ones for each rank."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.int32)


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# -- tickets -----------------------------------------------------------------------------------------------------------


def tickets(devices: int) -> Any:
    """Each block of each device draws a number at device 0, which all its threads have."""

    @T.prim_func
    def tickets(drawn: T.Tensor((BLOCKS, 64), "int32"), counter: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=BLOCKS, threads=64) as b:
            with T.Scale("block"), T.Scale("device"):
                ticket = T.atomic_add(counter[0], 1, dst=0, return_prev=True)
                for i in T.Parallel(64):
                    drawn[b, i] = ticket

    return tickets


def check_tickets(ranks: Ranks) -> None:
    drawn = torch.cat([args[0] for args in ranks])
    assert sorted(drawn[:, 0].tolist()) == list(range(BLOCKS * len(ranks)))
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert [args[1].item() for args in ranks] == [BLOCKS * len(ranks)] + [0] * (len(ranks) - 1)


def own_tickets(devices: int) -> Any:
    """One thread of each block, and one of each of its warps, draws a number at its own device."""

    @T.prim_func
    def own_tickets(
        drawn: T.Tensor((BLOCKS, 64), "int32"),
        by_warp: T.Tensor((BLOCKS, 2), "int32"),
        counter: T.Tensor((3,), "int32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=64) as b:
            with T.Scale("block"):
                ticket = T.invoke_one(T.atomic_add(counter[0], 1, return_prev=True))
                for i in T.Parallel(64):
                    drawn[b, i] = ticket
                T.invoke_one(T.atomic_add(counter[1], 3))
                with T.Scale("warp") as (w, _):
                    by_warp[b, w] = T.invoke_one(T.atomic_add(counter[2], 1, return_prev=True))

    return own_tickets


def check_own_tickets(ranks: Ranks) -> None:
    for drawn, by_warp, counter in ranks:
        assert sorted(drawn[:, 0].tolist()) == list(range(BLOCKS))
        assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
        assert sorted(by_warp.flatten().tolist()) == list(range(2 * BLOCKS))
        assert counter.tolist() == [BLOCKS, 3 * BLOCKS, 2 * BLOCKS]


def last_block(devices: int, order: str = "acq_rel") -> Any:
    """The block that comes last adds up what the others of all devices have put at device 0."""

    @T.prim_func
    def last_block(
        X: T.Tensor((BLOCKS, 64), "int32"),
        Y: T.Tensor((64,), "int32"),
        parts: T.Tensor((devices, BLOCKS, 64), "int32"),
        done: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=64) as b:
            with T.Scale("block"):
                tile = T.alloc((64,), "int32")
                total = T.alloc((64,), "int32", level="l0")
                T.copy(X[b, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, parts[rank, b, 0], dst=0)
                    before = T.atomic_add(done[0], 1, dst=0, return_prev=True, memory_order=order)
                    if before == size * BLOCKS - 1:
                        T.clear(total)
                        for n in T.serial(devices * BLOCKS):
                            T.copy(parts[n // BLOCKS, n % BLOCKS, 0], tile, src=0)
                            for i in T.Parallel(64):
                                total[i] += tile[i]
                        T.copy(total, Y[0], dst=0)

    return last_block


def check_last_block(ranks: Ranks) -> None:
    assert torch.equal(ranks[0][1], torch.stack([args[0] for args in ranks]).sum((0, 1)).int())


# -- elements and tiles ------------------------------------------------------------------------------------------------


def histogram(devices: int) -> Any:
    """A histogram of which each device has some bins; each element of a loop adds for itself."""

    @T.prim_func
    def histogram(X: T.Tensor((BLOCKS, 256), "int32"), bins: T.Tensor((BINS,), "int32")):
        with T.Kernel(device=devices, block=BLOCKS, threads=64) as b:
            with T.Scale("block"), T.Scale("device"):
                for i in T.Parallel(256):
                    T.atomic_add(bins[X[b, i] % BINS], 1, dst=X[b, i] // BINS)

    return histogram


def check_histogram(ranks: Ranks) -> None:
    found, values = torch.cat([args[1] for args in ranks]), torch.cat([args[0].flatten() for args in ranks])
    assert torch.equal(found, torch.bincount(values, minlength=BINS * len(ranks)).int())


def numbers(devices: int, dtype: str = "int32") -> Any:
    """Each block adds its number to an element of the next device."""

    @T.prim_func
    def numbers(X: T.Tensor((devices,), dtype)):
        with T.Kernel(device=devices, block=BLOCKS, threads=32) as b:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.atomic_add(X[rank], b + 1, dst=(rank + 1) % size)

    return numbers


def check_numbers(ranks: Ranks) -> None:
    for rank, (found,) in enumerate(ranks):
        expected = torch.zeros_like(found)
        expected[(rank - 1) % len(ranks)] = BLOCKS * (BLOCKS + 1) // 2
        assert torch.equal(found, expected)


def units(devices: int) -> Any:
    """Threads and warps signal, wait and add each for itself."""

    @T.prim_func
    def units(X: T.Tensor((2,), "int32"), Y: T.Tensor((64,), "int32"), Z: T.Tensor((64,), "int32")):
        with T.Kernel(device=devices, block=1, threads=64):
            by_thread, by_warp, around = T.alloc_flags(64), T.alloc_flags(2), T.alloc_flags((64, 1))
            with T.Scale("thread") as (t, threads):
                with T.Scale("device") as (rank, size):
                    Y[t] = t + rank
                    T.signal(by_thread[t], 1, dst=(rank + 1) % size)
                    T.wait(by_thread[t], ">=", 1)
                    T.atomic_add(X[0], t, dst=(rank + 1) % size)
                T.signal(around[(t + 1) % threads, 0], 2)
                found = T.wait_any(around[t, 0:1], "==", 2)
                Z[t] = Y[(t + threads - 1) % threads] + found
            with T.Scale("warp") as (w, _):
                with T.Scale("device") as (rank, size):
                    T.signal(by_warp[w], 1, dst=(rank + 1) % size)
                    T.wait(by_warp[w], ">=", 1)
                    T.atomic_add(X[1], w + 1, dst=(rank + 1) % size)

    return units


def check_units(ranks: Ranks) -> None:
    for rank, (x, y, z) in enumerate(ranks):
        assert x.tolist() == [63 * 32, 3]
        assert torch.equal(y, torch.arange(64).int() + rank) and torch.equal(z, y.roll(1))


def summed(devices: int, dtype: str = "int32", level: str = "l1", impl: str | None = None) -> Any:
    """Tiles of all devices add up at device 0."""
    rows = ROWS // 2

    @T.prim_func
    def summed(X: T.Tensor((ROWS, COLUMNS), dtype), Y: T.Tensor((ROWS, COLUMNS), dtype)):
        with T.Kernel(device=devices, block=2, threads=64) as b:
            arrived = T.alloc_flags(1)
            with T.Scale("block"):
                tile = T.alloc((rows, COLUMNS), dtype, level=level)
                T.copy(X[b * rows, 0], tile)
                with T.Scale("device"):
                    T.atomic_add(Y[b * rows, 0], tile, dst=0, impl=impl)
                    T.signal(arrived[0], dst=0)
                    T.barrier()

    return summed


def check_summed(ranks: Ranks) -> None:
    total = torch.stack([args[0].double() for args in ranks]).sum(0)
    assert torch.equal(ranks[0][1].double(), total)
    assert not any(args[1].any() for args in ranks[1:])


def row_sums(devices: int) -> Any:
    """Sums of rows, of which several threads have each, are added once; the last rows lie beyond the tensor."""

    @T.prim_func
    def row_sums(X: T.Tensor((ROWS, COLUMNS), "int32"), Y: T.Tensor((BLOCKS, ROWS - 8), "int32")):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            with T.Scale("block"):
                tile, sums = T.alloc((ROWS, COLUMNS), "int32", level="l0"), T.alloc((ROWS,), "int32", level="l0")
                T.copy(X, tile)
                T.reduce_sum(tile, sums, dim=1)
                with T.Scale("device") as (rank, size):
                    T.atomic_add(Y[b, 0:ROWS], sums, dst=(rank + 1) % size)

    return row_sums


def check_row_sums(ranks: Ranks) -> None:
    for rank, (_, found) in enumerate(ranks):
        expected = ranks[rank - 1][0].sum(1).int()[: ROWS - 8]
        assert torch.equal(found, expected.expand_as(found))


# -- several flags -----------------------------------------------------------------------------------------------------


def gathered(devices: int, forgets: bool = False) -> Any:
    """Each device waits for the flags of all; one of device 0 may be forgotten."""

    @T.prim_func
    def gathered(X: T.Tensor((32,), "int32"), Y: T.Tensor((devices, 32), "int32")):
        with T.Kernel(device=devices, block=1, threads=32):
            inbox = T.alloc((devices, 32), "int32", level="l2")
            arrived = T.alloc_flags(devices)
            with T.Scale("block"):
                tile = T.alloc((32,), "int32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    for peer in T.serial(devices):
                        if not forgets or peer != 0 or rank != devices - 1:
                            T.copy(tile, inbox[rank, 0:32], dst=peer, signal=arrived[rank])
                    T.wait(arrived[0:devices], ">=", 1)
                T.copy(inbox, Y)

    return gathered


def check_gathered(ranks: Ranks) -> None:
    for args in ranks:
        assert torch.equal(args[1], torch.stack([x for x, _ in ranks]))


def handled(devices: int) -> Any:
    """Each device adds up what the others send, in the order in which it arrives."""

    @T.prim_func
    def handled(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32"), order: T.Tensor((devices,), "int32")):
        with T.Kernel(device=devices, block=1, threads=32):
            inbox = T.alloc((devices, 32), "int32", level="l2")
            arrived = T.alloc_flags((2, devices))
            with T.Scale("block"):
                tile = T.alloc((32,), "int32")
                total = T.alloc((32,), "int32", level="l0")
                T.copy(X, tile)
                T.clear(total)
                with T.Scale("device") as (rank, size):
                    for peer in T.serial(devices):
                        T.copy(tile, inbox[rank, 0:32], dst=peer, signal=arrived[1, rank])
                    for n in T.serial(devices):
                        found = T.wait_any(arrived[1, 0:devices], "==", 1)
                        T.signal(arrived[1, found], 0, op="set")
                        order[n] = found
                        for i in T.Parallel(32):
                            total[i] += inbox[found, i]
                T.copy(total, Y)

    return handled


def check_handled(ranks: Ranks) -> None:
    for _, found, order in ranks:
        assert torch.equal(found, torch.stack([args[0] for args in ranks]).sum(0).int())
        assert sorted(order.tolist()) == list(range(len(ranks)))


# -- views -------------------------------------------------------------------------------------------------------------


def views(devices: int) -> Any:
    """The next device's tensor, seen as rows and as wider numbers: a put, signals, additions, a get."""

    @T.prim_func
    def views(X: T.Tensor((8,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices, block=1, threads=32):
            rows, wide = T.view(X, (2, 4)), T.view(X, (4,), "int64")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((4,), "int32")
                T.fill(tile, rank + 1)
                T.copy(tile, rows[1, 0:4], dst=(rank + 1) % size)
                T.signal(wide[0], 7, op="set", dst=(rank + 1) % size)
                T.atomic_add(wide[1], 2**33 + 5, dst=(rank + 1) % size)
                for i in T.Parallel(2):
                    T.atomic_add(wide[1], 2 + i, dst=(rank + 1) % size)
                T.barrier()
                T.copy(rows[1, 0:4], tile, src=(rank + 1) % size)
                T.copy(tile, Y)

    return views


def check_views(ranks: Ranks) -> None:
    for rank, (x, y) in enumerate(ranks):
        left = len(ranks) if rank == 0 else rank
        assert x.tolist() == [7, 0, 10, 2] + [left] * 4 and y.tolist() == [rank + 1] * 4


CASES = {
    "tickets": Case(tickets, lambda r, n: [integers(BLOCKS, 64), integers(1)], check_tickets),
    "own_tickets": Case(
        own_tickets, lambda r, n: [integers(BLOCKS, 64), integers(BLOCKS, 2), integers(3)], check_own_tickets
    ),
    "last_block": Case(
        last_block,
        lambda r, n: [data(r, BLOCKS, 64), integers(64), integers(n, BLOCKS, 64), integers(1)],
        check_last_block,
    ),
    "histogram": Case(
        histogram, lambda r, n: [data(r, BLOCKS, 256, low=0, high=BINS * n), integers(BINS)], check_histogram
    ),
    "units": Case(units, lambda r, n: [integers(2), integers(64), integers(64)], check_units),
    "row_sums": Case(row_sums, lambda r, n: [data(r, ROWS, COLUMNS), integers(BLOCKS, ROWS - 8)], check_row_sums),
    "gathered": Case(gathered, lambda r, n: [data(r, 32), integers(n, 32)], check_gathered),
    "handled": Case(handled, lambda r, n: [data(r, 32), integers(32), integers(n)], check_handled),
    "views": Case(views, lambda r, n: [integers(8), integers(4)], check_views),
    **{
        f"numbers_{kind}": Case(
            lambda n, kind=kind: numbers(n, kind), lambda r, n, kind=kind: [torch.zeros(n, dtype=getattr(torch, kind))],
            check_numbers,
        )
        for kind in KINDS
    },
    **{
        f"summed_{kind}_{level}{'_tma' if impl else ''}": Case(
            lambda n, kind=kind, level=level, impl=impl: summed(n, kind, level, impl),
            lambda r, n, kind=kind: [
                tensor.to(getattr(torch, kind)) for tensor in (data(r, ROWS, COLUMNS), integers(ROWS, COLUMNS))
            ],
            check_summed,
        )
        for kind, level, impl in [
            ("int32", "l0", None), ("int32", "l1", None), ("float32", "l1", None), ("bfloat16", "l0", None),
            ("float16", "l1", None), ("float32", "l1", "tma"), ("bfloat16", "l1", "tma"),
        ]
    },
}  # fmt: skip
