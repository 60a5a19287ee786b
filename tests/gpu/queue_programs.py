# SPDX-License-Identifier: MIT
"""Programs whose devices start copies and gathers on their copy queues, concurrently with grids that occupy all SMs.

Each has a reference for all ranks' arguments: the emulator would take long for these numbers of programs.
"""

from collections.abc import Callable
from typing import Any

import torch

import tilescale
import tilescale.language as T

COLUMNS, CHUNK, PIECES, THREADS = 64, 48, 24, 1024
"""Rows of a chunk, and number of programs; with this number of threads an SM holds two of them."""

PIECE = CHUNK // PIECES


def gather(in_place: bool, rows: int = 6 * CHUNK - 20) -> Any:
    """All devices' parts on every device; programs take the chunks that come last first. The last one is smaller."""
    devices, chunks = tilescale.init().size, -(-rows // CHUNK)
    whole = (devices, rows, COLUMNS) if in_place else (devices * rows, COLUMNS)

    @T.prim_func
    def gathers(
        X: T.Tensor((rows, COLUMNS), "float32"),
        G: T.Tensor(whole, "float32"),
        Y: T.Tensor((devices, rows, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=(PIECES, chunks, devices), threads=THREADS) as (piece, c, turn):
            flags = T.alloc_flags((devices, chunks))
            with T.Scale("device") as (rank, size):
                if in_place:
                    T.all_gather(G[rank, 0:rows, 0:COLUMNS], G, signal=flags, chunk=CHUNK)
                else:
                    T.all_gather(X, G, signal=flags, chunk=CHUNK)
            with T.Scale("block"):
                sender = (rank + devices - 1 - turn) % devices
                last = chunks - 1 - c
                T.wait(flags[sender, last], ">=", 1)
                for i, j in T.Parallel(PIECE, COLUMNS):
                    row = last * CHUNK + piece * PIECE + i
                    if row < rows:
                        if in_place:
                            Y[sender, row, j] = G[sender, row, j] + 1
                        else:
                            Y[sender, row, j] = G[sender * rows + row, j] + 1

    return gathers


def columns(layers: int = 2, chunk: int = 24) -> Any:
    """All devices' columns of each layer on every device, by flags of the layer; the last chunk is smaller."""
    devices, chunks = tilescale.init().size, -(-COLUMNS // chunk)

    @T.prim_func
    def gathers(
        X: T.Tensor((layers, CHUNK, COLUMNS), "float32"),
        G: T.Tensor((layers, CHUNK, devices * COLUMNS), "float32"),
        Y: T.Tensor((layers, devices, CHUNK, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=(chunks, layers, devices), threads=THREADS) as (c, back, turn):
            flags = T.alloc_flags((layers, devices, chunks))
            with T.Scale("device") as (rank, size):
                for layer in T.serial(layers):
                    T.all_gather(X[layer, ...], G[layer, ...], dim=2, signal=flags[layer, ...], chunk=chunk)
            with T.Scale("block"):
                sender, layer = (rank + devices - 1 - turn) % devices, layers - 1 - back
                T.wait(flags[layer, sender, c], ">=", 1)
                for i, j in T.Parallel(CHUNK, chunk):
                    if c * chunk + j < COLUMNS:
                        Y[layer, sender, i, c * chunk + j] = G[layer, i, sender * COLUMNS + c * chunk + j] + 1

    return gathers


def put(chunks: int = 6) -> Any:
    """Rows that programs have made leave as soon as their chunk is complete, into columns of the next device's tensor.

    The first programs of the grid make them, the others use what arrives.
    """
    devices, rows = tilescale.init().size, chunks * CHUNK

    @T.prim_func
    def puts(
        X: T.Tensor((rows, COLUMNS), "float32"),
        made: T.Tensor((rows, COLUMNS), "float32"),
        inbox: T.Tensor((rows, 2 * COLUMNS), "float32"),
        Y: T.Tensor((2, rows, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=(PIECES, chunks, 3), threads=THREADS) as (piece, c, uses):
            done = T.alloc_flags((chunks,))
            arrived = T.alloc_flags((1,), "int64")
            with T.Scale("device") as (rank, size):
                for k in T.serial(chunks):
                    T.copy(
                        made[k * CHUNK : (k + 1) * CHUNK, 0:COLUMNS],
                        inbox[k * CHUNK : (k + 1) * CHUNK, COLUMNS : 2 * COLUMNS],
                        dst=(rank + 1) % size,
                        signal=arrived[0],
                        after=(done[k], ">", PIECES - 1),
                    )
            with T.Scale("block"):
                first = c * CHUNK + piece * PIECE
                if uses == 0:
                    for i, j in T.Parallel(PIECE, COLUMNS):
                        made[first + i, j] = 2 * X[first + i, j]
                    T.signal(done[c])
                else:
                    T.wait(arrived[0], ">=", c + 1)
                    for i, j in T.Parallel(PIECE, COLUMNS):
                        Y[uses - 1, first + i, j] = inbox[first + i, COLUMNS + j] + 1

    return puts


def everywhere() -> Any:
    """A part to every device, to itself too; then a number that a flag of the caller's is set to."""
    devices = tilescale.init().size

    @T.prim_func
    def parts(
        X: T.Tensor((CHUNK, COLUMNS), "float32"),
        Y: T.Tensor((devices, CHUNK, COLUMNS), "float32"),
        Z: T.Tensor((devices, CHUNK, COLUMNS), "float32"),
        flags: T.Tensor((devices,), "int32"),
    ):
        with T.Kernel(device=devices, block=(PIECES, devices), threads=THREADS) as (piece, sender):
            with T.Scale("device") as (rank, size):
                for step in T.serial(size):
                    T.copy(X, Y[rank, 0, 0], dst=(rank + step) % size, signal=flags[rank], value=7, op="set")
            with T.Scale("block"):
                T.wait(flags[sender], "==", 7)
                for i, j in T.Parallel(PIECE, COLUMNS):
                    Z[sender, piece * PIECE + i, j] = Y[sender, piece * PIECE + i, j] + 1

    return parts


# -- what they make of all ranks' arguments ----------------------------------------------------------------------------


def gathered(ranks: list[list[torch.Tensor]], in_place: bool) -> None:
    parts = [whole[rank] if in_place else part for rank, (part, whole, _) in enumerate(ranks)]
    everything = torch.stack(parts)
    for _, whole, out in ranks:
        whole.copy_(everything.view(whole.shape))
        out.copy_(everything + 1)


def side_by_side(ranks: list[list[torch.Tensor]]) -> None:
    parts = torch.stack([x for x, _, _ in ranks], dim=1)
    for _, whole, out in ranks:
        whole.copy_(torch.cat([x for x, _, _ in ranks], dim=2))
        out.copy_(parts + 1)


def arrived(ranks: list[list[torch.Tensor]]) -> None:
    for x, made, _, _ in ranks:
        made.copy_(2 * x)
    for rank, (_, _, inbox, out) in enumerate(ranks):
        inbox[:, COLUMNS:] = ranks[rank - 1][1]
        out.copy_((inbox[:, COLUMNS:] + 1).expand(out.shape))


def spread(ranks: list[list[torch.Tensor]]) -> None:
    parts = torch.stack([x for x, _, _, _ in ranks])
    for _, y, z, flags in ranks:
        y.copy_(parts)
        z.copy_(parts + 1)
        flags.fill_(7)


def checks() -> dict[str, tuple[Any, Callable[[list[Any]], None]]]:
    """Each program with what it makes, by name."""
    return {
        "gather in place": (gather(True), lambda ranks: gathered(ranks, True)),
        "gather of parts": (gather(False), lambda ranks: gathered(ranks, False)),
        "gather of columns": (columns(), side_by_side),
        "put after signals": (put(), arrived),
        "put to all": (everywhere(), spread),
    }
