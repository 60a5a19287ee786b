# SPDX-License-Identifier: MIT
"""Programs whose device phases go between nodes, and what they compute."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import tilescale.language as T

ROWS, COLUMNS = 48, 40

Case = tuple[Any, list[tuple[int, ...]], str, Callable[[list[list[torch.Tensor]]], list[dict[int, torch.Tensor]]]]
"""A program, the shapes of its tensors but the flags, their type, and what they hold afterwards on each rank."""


def puts(level: str, nodes: int, devices: int) -> Case:
    """To the next unit of a level, with a signal; a credit goes back; then one rank sends a slice to another."""
    ranks, shape = nodes * devices, (ROWS, COLUMNS)
    count = {"node": nodes, "device": ranks}[level]
    extents = {"node": nodes, "device": devices} if level == "node" else {"device": ranks}

    @T.prim_func
    def ring(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(**extents):
            with T.Scale(level) as (rank, size):
                right = (rank + 1) % size
                T.copy(X, Y, dst=right, signal=flags[0], value=3)
                T.wait(flags[0], "==", 3)
                T.signal(flags[1], dst=(rank + size - 1) % size)
                T.wait(flags[1], ">=", 1)
                if rank == 0:
                    T.copy(X[0:8, :], Y[8:16, :], dst=size - 1, signal=flags[2])
                if rank == size - 1:
                    T.wait(flags[2], ">=", 1)
                T.barrier()

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        step = ranks // count
        found = []
        for me in range(ranks):
            rank, rest = divmod(me, step)
            got = given[(rank - 1) % count * step + rest][0].clone()
            if rank == count - 1:
                got[8:16] = given[rest][0][0:8]
            found.append({1: got, 2: torch.tensor([3, 1, int(rank == count - 1), 0], dtype=torch.int32)})
        return found

    return ring, [shape, shape], "float32", wanted


def gets(level: str, nodes: int, devices: int) -> Case:
    """A slice from the next unit of a level, in each of three rounds."""
    ranks, shape = nodes * devices, (ROWS, COLUMNS)
    extents = {"node": nodes, "device": devices} if level == "node" else {"device": ranks}
    count = {"node": nodes, "device": ranks}[level]

    @T.prim_func
    def slices(X: T.Tensor(shape, "bfloat16"), Y: T.Tensor(shape, "bfloat16"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(**extents):
            with T.Scale(level) as (rank, size):
                for turn in T.serial(3):
                    T.barrier()
                    first = turn * 16
                    T.copy(X[first : first + 16, :], Y[first : first + 16, :], src=(rank + 1 + turn) % size)
                T.barrier()

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        step = ranks // count
        found = []
        for me in range(ranks):
            rank, rest = divmod(me, step)
            parts = [given[(rank + 1 + k) % count * step + rest][0][k * 16 : k * 16 + 16] for k in range(3)]
            found.append({1: torch.cat(parts)})
        return found

    return slices, [shape, shape], "bfloat16", wanted


def collective(name: str, rows: int, dtype: str, impl: str | None, nodes: int, devices: int, op: str = "sum") -> Case:
    """One collective between all devices of all nodes, twice: the second one must not overtake the first."""
    ranks = nodes * devices
    part, whole = (rows, COLUMNS), (rows * ranks, COLUMNS)
    source = whole if name in ("reduce_scatter", "all_to_all") else part
    target = whole if name in ("all_gather", "all_to_all") else part

    @T.prim_func
    def moved(X: T.Tensor(source, dtype), Y: T.Tensor(target, dtype), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=ranks):
            with T.Scale("device") as (rank, size):
                for _ in T.serial(2):
                    if name == "allreduce":
                        T.copy(X, Y)
                        T.allreduce(Y, op=op, impl=impl)
                    elif name == "broadcast":
                        T.copy(X, Y)
                        T.broadcast(Y, root=size - 2, impl=impl)
                    elif name == "all_gather":
                        T.all_gather(X, Y, impl=impl)
                    elif name == "reduce_scatter":
                        T.reduce_scatter(X, Y, op=op, impl=impl)
                    else:
                        T.all_to_all(X, Y, impl=impl)

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        mine = [x.double() for x, *_ in given]
        total = torch.stack(mine).sum(0) if op == "sum" else torch.stack(mine).amax(0)
        results = {
            "allreduce": lambda r: total,
            "broadcast": lambda r: mine[ranks - 2],
            "all_gather": lambda r: torch.cat(mine),
            "reduce_scatter": lambda r: total.chunk(ranks)[r],
            "all_to_all": lambda r: torch.cat([x.chunk(ranks)[r] for x in mine]),
        }
        return [{1: results[name](r)} for r in range(ranks)]

    return moved, [source, target], dtype, wanted


def by_hand(nodes: int, devices: int) -> Case:
    """The three collectives of examples/distributed/19_two_nodes.py, each on the network of its level."""
    shape = (ROWS, COLUMNS)

    @T.prim_func
    def three(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(node=nodes, device=devices):
            share = T.alloc((ROWS // devices, COLUMNS), "float32", level="l2")
            with T.Scale("device"):
                T.reduce_scatter(X, share)
            with T.Scale("node"):
                T.allreduce(share)
            with T.Scale("device"):
                T.all_gather(share, Y)

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        return [{1: torch.stack([x.double() for x, *_ in given]).sum(0)}] * len(given)

    return three, [shape, shape], "float32", wanted


CHUNK_ROWS, CHUNKS = 32, 3


def queued_gather(nodes: int, devices: int) -> Case:
    """A gather on the copy queues; programs add 1 to what has come, chunk by chunk, the last ones first."""
    ranks, rows = nodes * devices, CHUNK_ROWS * CHUNKS - 5

    @T.prim_func
    def gathered(
        X: T.Tensor((rows, COLUMNS), "float32"),
        Y: T.Tensor((ranks * rows, COLUMNS), "float32"),
        flags: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(device=ranks, block=(CHUNKS, ranks), threads=128) as (c, sender):
            whole = T.alloc((ranks * rows, COLUMNS), "float32", level="l2")
            arrived = T.alloc_flags((ranks, CHUNKS))
            with T.Scale("device"):
                T.all_gather(X, whole, signal=arrived, chunk=CHUNK_ROWS)
            with T.Scale("block"):
                last = CHUNKS - 1 - c
                T.wait(arrived[sender, last], ">=", 1)
                for i, j in T.Parallel(CHUNK_ROWS, COLUMNS):
                    row = last * CHUNK_ROWS + i
                    if row < rows:
                        Y[sender * rows + row, j] = whole[sender * rows + row, j] + 1

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        return [{1: torch.cat([x for x, *_ in given]) + 1}] * ranks

    return gathered, [(rows, COLUMNS), (ranks * rows, COLUMNS)], "float32", wanted


def queued_copies(nodes: int, devices: int) -> Case:
    """Programs make rows, the queue sends each chunk to the next device when it is complete, programs there use it."""
    ranks, shape = nodes * devices, (CHUNK_ROWS * CHUNKS, COLUMNS)

    @T.prim_func
    def sent(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=ranks, block=CHUNKS, threads=128) as c:
            made = T.alloc(shape, "float32", level="l2")
            inbox = T.alloc(shape, "float32", level="l2")
            done = T.alloc_flags((CHUNKS,))
            arrived = T.alloc_flags((CHUNKS,))
            with T.Scale("device") as (rank, size):
                for k in T.serial(CHUNKS):
                    T.copy(
                        made[k * CHUNK_ROWS : (k + 1) * CHUNK_ROWS, :],
                        inbox[k * CHUNK_ROWS : (k + 1) * CHUNK_ROWS, :],
                        dst=(rank + 1) % size,
                        signal=arrived[k],
                        after=(done[k], ">=", 1),
                    )
            with T.Scale("block"):
                for i, j in T.Parallel(CHUNK_ROWS, COLUMNS):
                    made[c * CHUNK_ROWS + i, j] = X[c * CHUNK_ROWS + i, j] * 2
                T.signal(done[c])
                T.wait(arrived[c], ">=", 1)
                for i, j in T.Parallel(CHUNK_ROWS, COLUMNS):
                    Y[c * CHUNK_ROWS + i, j] = inbox[c * CHUNK_ROWS + i, j] + 1

    def wanted(given: list[list[torch.Tensor]]) -> list[dict[int, torch.Tensor]]:
        return [{1: given[(me - 1) % ranks][0] * 2 + 1} for me in range(ranks)]

    return sent, [shape, shape], "float32", wanted


def cases(nodes: int, devices: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The programs of a layout by name."""
    for level in ("node", "device"):
        yield f"put, {level}", lambda level=level: puts(level, nodes, devices)
        yield f"get, {level}", lambda level=level: gets(level, nodes, devices)
    yield "three collectives", lambda: by_hand(nodes, devices)
    yield "queued gather", lambda: queued_gather(nodes, devices)
    yield "queued copies", lambda: queued_copies(nodes, devices)
    impls = ("hierarchical_direct", "nccl") if devices > 1 else (None,)
    for name in ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        for impl in impls:
            yield f"{name} {impl}", lambda n=name, i=impl: collective(n, 7, "float32", i, nodes, devices)
        yield f"{name} large", lambda n=name: collective(n, 80_000, "bfloat16", impls[0], nodes, devices)
    yield "allreduce max", lambda: collective("allreduce", 33, "int32", None, nodes, devices, "max")
