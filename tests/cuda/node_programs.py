# SPDX-License-Identifier: MIT
"""Programs whose tiles go between nodes. The GPU check runs them too."""

from typing import Any

import torch

import tilescale.language as T

BLOCKS, ROWS, COLUMNS = 3, 16, 64


def extents(level: str, nodes: int, devices: int) -> tuple[dict[str, int], int]:
    """The launch of a level, and how many siblings it has: nodes of devices, or all devices in one row."""
    if level == "node":
        return {"node": nodes, "device": devices}, nodes
    return {"device": nodes * devices}, nodes * devices


def ring(level: str, sizes: dict[str, int], flag: str = "int32", op: str = "add") -> Any:
    """Every block puts its rows to the next unit with a signal, and returns a credit when it has read what came; three
    times, each time what has come before."""
    shape = (BLOCKS * ROWS, COLUMNS)

    @T.prim_func
    def ring_of_tiles(
        X: T.Tensor(shape, "bfloat16"),
        Y: T.Tensor(shape, "bfloat16"),
        Z: T.Tensor(shape, "bfloat16"),
        flags: T.Tensor((2, BLOCKS), flag),
    ):
        with T.Kernel(**sizes, block=BLOCKS, threads=128) as bx:
            tile = T.alloc((ROWS, COLUMNS), "bfloat16", level="l1")
            with T.Scale("block"), T.Scale(level) as (rank, size):
                T.copy(X[bx * ROWS, 0], tile)
                for turn in T.serial(3):
                    T.copy(tile, Y[bx * ROWS, 0], dst=(rank + 1) % size, signal=flags[0, bx], value=turn + 1, op="set")
                    T.wait(flags[0, bx], "==", turn + 1)
                    T.copy(Y[bx * ROWS, 0], tile)
                    T.signal(flags[1, bx], 1 if op == "add" else turn + 1, op=op, dst=(rank + size - 1) % size)
                    T.wait(flags[1, bx], ">=", turn + 1)
                T.copy(tile, Z[bx * ROWS, 0])

    return ring_of_tiles


def barrier(level: str, sizes: dict[str, int]) -> Any:
    """Blocks write where they are, synchronize, and read from another unit; three times, each time another one."""

    @T.prim_func
    def barrier_of_blocks(X: T.Tensor((BLOCKS, 64), "float32"), Y: T.Tensor((3, BLOCKS, 64), "float32")):
        with T.Kernel(**sizes, block=BLOCKS, threads=64) as bx:
            held = T.alloc((BLOCKS, 64), "float32", level="l2")
            tile = T.alloc((1, 64), "float32", level="l1")
            with T.Scale("block"), T.Scale(level) as (rank, size):
                for turn in T.serial(3):
                    for i in T.Parallel(64):
                        held[bx, i] = X[bx, i] * (turn + 1)
                    T.barrier()
                    T.copy(held[bx, 0], tile, src=(rank + 1 + turn) % size)
                    for i in T.Parallel(64):
                        Y[turn, bx, i] = tile[0, i]
                    T.barrier()

    return barrier_of_blocks


def collectives(level: str, sizes: dict[str, int], units: int) -> Any:
    """All collectives of tiles, twice: the second ones must not overtake the first."""
    rows = 4 * units

    @T.prim_func
    def collectives_of_tiles(
        X: T.Tensor((BLOCKS, rows, COLUMNS), "float32"), Y: T.Tensor((5, BLOCKS, rows, COLUMNS), "float32")
    ):
        with T.Kernel(**sizes, block=BLOCKS, threads=128) as bx:
            whole = T.alloc((rows, COLUMNS), "float32", level="l1")
            other = T.alloc((rows, COLUMNS), "float32", level="l1")
            part = T.alloc((4, COLUMNS), "float32", level="l1")
            held = T.alloc_fragment((rows, COLUMNS), "float32")
            with T.Scale("block"), T.Scale(level) as (rank, size):
                for _ in T.serial(2):
                    T.copy(X[bx, 0, 0], whole)
                    T.reduce_scatter(whole, part)
                    T.all_gather(part, other)
                    T.copy(other, Y[0, bx, 0, 0])
                    T.all_to_all(whole, other)
                    T.copy(other, Y[1, bx, 0, 0])
                    T.copy(whole, held)
                    T.allreduce(held, op="max")
                    T.copy(held, Y[2, bx, 0, 0])
                    T.copy(whole, other)
                    T.broadcast(other, root=size - 1)
                    T.copy(other, Y[3, bx, 0, 0])
                    T.allreduce(whole)
                    T.copy(whole, Y[4, bx, 0, 0])

    return collectives_of_tiles


Cases = tuple[Any, list[tuple[tuple[int, ...], str]], Any]
"""A program, shape and type of each argument, and a function from all siblings' inputs to their results."""


def cases(level: str, nodes: int, devices: int) -> dict[str, Cases]:
    """All programs of a level, and what they compute: from the first arguments of all siblings those of each."""
    sizes, units = extents(level, nodes, devices)
    rows = 4 * units
    tile = ((BLOCKS * ROWS, COLUMNS), "bfloat16")
    whole = (BLOCKS, rows, COLUMNS)

    def shifted(given: list[Any], me: int) -> dict[int, Any]:
        got = given[(me - 3) % units]
        return {1: got, 2: got, 3: torch.full((2, BLOCKS), 3)}

    def read(given: list[Any], me: int) -> dict[int, Any]:
        return {1: torch.stack([given[(me + 1 + turn) % units] * (turn + 1) for turn in range(3)])}

    def combined(given: list[Any], me: int) -> dict[int, Any]:
        everybodys = torch.stack(given)
        mine = torch.cat([x[:, 4 * me : 4 * me + 4] for x in given], 1)
        total = everybodys.sum(0)
        return {1: torch.stack([total, mine, everybodys.amax(0), given[-1], total])}

    return {
        "ring": (ring(level, sizes), [tile, tile, tile, ((2, BLOCKS), "int32")], shifted),
        "ring, 64 bits, set": (ring(level, sizes, "int64", "set"), [tile, tile, tile, ((2, BLOCKS), "int64")], shifted),
        "barrier": (barrier(level, sizes), [((BLOCKS, 64), "float32"), ((3, BLOCKS, 64), "float32")], read),
        "collectives": (collectives(level, sizes, units), [(whole, "float32"), ((5, *whole), "float32")], combined),
    }


def siblings(level: str, nodes: int, devices: int, rank: int) -> tuple[list[int], int]:
    """The ranks of the siblings of one, and its own number among them."""
    if level == "device":
        return list(range(nodes * devices)), rank
    return list(range(rank % devices, nodes * devices, devices)), rank // devices


def arguments(shapes: list[tuple[tuple[int, ...], str]], rank: int, seed: int) -> list[Any]:
    """Those of a rank: small numbers, of which sums are exact in any order; what is written to is poisoned."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    made = [torch.randint(-9, 10, shapes[0][0], generator=generator)]
    made += [torch.full(shape, 0 if "int" in dtype else torch.nan) for shape, dtype in shapes[1:]]
    return [x.to(getattr(torch, dtype)) for x, (_, dtype) in zip(made, shapes, strict=True)]
