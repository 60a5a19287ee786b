# SPDX-License-Identifier: MIT
"""Atomic operations on global and shared memory: scalars, pairs, quads and tiles."""

import torch

from .base import HOPPER_UP, PlainKernel, f64, poison, randint, randn


def histogram(T):
    """Counts collected in shared memory by every block, then added to the global ones."""
    bins, length, blocks = 16, 256, 2

    @T.prim_func
    def main(x: T.Tensor((blocks, length), T.int32), counts: T.Tensor((bins,), T.int32)):
        with T.Kernel(blocks, threads=64) as bx:
            local_counts = T.alloc_shared((bins,), T.int32)
            T.clear(local_counts)
            for i in T.Parallel(length):
                T.atomic_add(local_counts[x[bx, i]], 1)
            for i in T.Parallel(bins):
                T.atomic_add(counts[i], local_counts[i])

    return main


def extrema(T):
    """Largest and smallest of all rows, the arrival order of the blocks as a returned previous value."""
    blocks, length = 3, 64

    @T.prim_func
    def main(
        x: T.Tensor((blocks, length), T.int32),
        high: T.Tensor((length,), T.int32),
        low: T.Tensor((length,), T.int32),
        mask: T.Tensor((1,), T.int32),
        tickets: T.Tensor((blocks,), T.int32),
        counter: T.Tensor((1,), T.int32),
    ):
        with T.Kernel(blocks, threads=32) as bx:
            tx = T.get_thread_binding()
            for i in T.Parallel(length):
                T.atomic_max(high[i], x[bx, i])
            for i in T.Parallel(length):
                T.atomic_min(low[i], x[bx, i], memory_order="relaxed")
            if tx == 0:
                T.atomic_or(mask[0], T.shift_left(1, bx * 4))
                ticket = T.atomic_add(counter[0], 1, return_prev=True, memory_order="acq_rel")
                tickets[ticket] = 1 + ticket

    return main


def tile_atomics(T):
    """Whole tiles added, maximised and minimised into global memory by several blocks."""
    rows, cols, blocks = 16, 32, 3

    @T.prim_func
    def main(
        x: T.Tensor((blocks, rows, cols), T.float32),
        total: T.Tensor((rows, cols), T.float32),
        high: T.Tensor((rows, cols), T.float32),
        low: T.Tensor((rows, cols), T.float32),
    ):
        with T.Kernel(blocks, threads=64) as bx:
            tile = T.alloc_fragment((rows, cols), T.float32)
            staged = T.alloc_shared((rows, cols), T.float32)
            T.copy(x[bx, :, :], tile)
            T.copy(tile, staged)
            T.atomic_add(total, tile)
            T.atomic_max(high, staged)
            T.atomic_min(low, tile)

    return main


def packed_atomics(T):
    """Two halves at a time."""
    length, blocks = 64, 2

    @T.prim_func
    def main(x: T.Tensor((blocks, length), T.float16), out: T.Tensor((length,), T.float16)):
        with T.Kernel(blocks, threads=32) as bx:
            tx = T.get_thread_binding()
            T.atomic_addx2(out[tx * 2], x[bx, tx * 2])

    return main


def quad_atomics(T):
    """Four floats at a time, and a tile added by the tensor memory accelerator."""
    length, blocks = 128, 2

    @T.prim_func
    def main(
        x: T.Tensor((blocks, length), T.float32),
        out: T.Tensor((length,), T.float32),
        tile_out: T.Tensor((8, 16), T.float32),
    ):
        with T.Kernel(blocks, threads=32) as bx:
            tx = T.get_thread_binding()
            staged = T.alloc_shared((8, 16), T.float32)
            T.atomic_addx4(out[tx * 4], x[bx, tx * 4])
            for i, j in T.Parallel(8, 16):
                staged[i, j] = x[bx, i * 16 + j]
            T.atomic_add(tile_out, staged, use_tma=True)

    return main


def last_block_sums(T):
    """Every block stores a partial sum and takes a ticket; the one that draws the last adds the partial sums up."""
    blocks, length = 4, 32

    @T.prim_func
    def main(
        x: T.Tensor((blocks, length), T.float32),
        partial: T.Tensor((blocks,), T.float32),
        counter: T.Tensor((1,), T.int32),
        out: T.Tensor((1,), T.float32),
    ):
        with T.Kernel(blocks, threads=length) as bx:
            tx = T.get_thread_binding()
            total = T.alloc_var(T.float32, init=0.0)
            block_sum = T.warp_reduce_sum(x[bx, tx])
            if tx == 0:
                T.atomic_store(partial[bx], block_sum, memory_order="relaxed")
                ticket = T.atomic_add(counter[0], 1, return_prev=True, memory_order="acq_rel")
                if ticket == blocks - 1:
                    for other in T.serial(blocks):
                        total = total + T.atomic_load(partial[other], memory_order="relaxed")
                    out[0] = total

    return main


def spin_flag(T):
    """Block 0 writes a row and raises a flag; block 1 waits for the flag in a while loop and passes the row on."""
    length = 64

    @T.prim_func
    def main(
        x: T.Tensor((length,), T.float32),
        row: T.Tensor((length,), T.float32),
        flag: T.Tensor((1,), T.int32),
        out: T.Tensor((length,), T.float32),
    ):
        with T.Kernel(2, threads=length) as bx:
            tx = T.get_thread_binding()
            seen = T.alloc_var(T.int32, init=0)
            if bx == 0:
                T.atomic_store(row[tx], x[tx] * 2, memory_order="relaxed")
                T.sync_threads()
                if tx == 0:
                    T.atomic_store(flag[0], 1, memory_order="release")
            else:
                while seen == 0:
                    seen = T.atomic_load(flag[0], memory_order="acquire")
                out[tx] = T.atomic_load(row[tx], memory_order="relaxed") + 1

    return main


def _extrema_inputs(rng):
    return [
        randint(rng, -100, 100, 3, 64),
        torch.full((64,), -20, dtype=torch.int32),
        torch.full((64,), 20, dtype=torch.int32),
        torch.full((1,), 2, dtype=torch.int32),
        poison(3, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    ]


def _extrema_reference(args):
    x = args[0].to(torch.int64)
    return {
        1: x.amax(0).clamp(min=-20),
        2: x.amin(0).clamp(max=20),
        3: torch.tensor([2 | 1 | 16 | 256]),
        4: torch.tensor([1, 2, 3]),
        5: torch.tensor([3]),
    }


def _tile_inputs(rng):
    return [randn(rng, 3, 16, 32, dtype=_F32), *(randn(rng, 16, 32, dtype=_F32) for _ in range(3))]


def _tile_reference(args):
    x, total, high, low = (f64(arg) for arg in args)
    return {1: total + x.sum(0), 2: torch.maximum(high, x.amax(0)), 3: torch.minimum(low, x.amin(0))}


def _quad_reference(args):
    total = f64(args[0]).sum(0)
    return {1: f64(args[1]) + total, 2: f64(args[2]) + total.reshape(8, 16)}


def _spin_inputs(rng):
    return [randn(rng, 64, dtype=_F32), poison(64), torch.zeros(1, dtype=torch.int32), poison(64)]


def _spin_reference(args):
    x = f64(args[0])
    return {1: 2 * x, 2: torch.tensor([1]), 3: 2 * x + 1}


_F32 = torch.float32
_EXACT = {"rtol": 0.0, "atol": 0.0}

KERNELS = (
    PlainKernel(
        name="histogram",
        build=histogram,
        inputs=lambda rng: [randint(rng, 0, 16, 2, 256), randint(rng, 0, 5, 16)],
        reference=lambda args: {1: args[1].to(torch.int64) + torch.bincount(args[0].flatten().long(), minlength=16)},
        covers=("atomic_add", "shared atomics", "histogram"),
        **_EXACT,
    ),
    PlainKernel(
        name="extrema",
        build=extrema,
        inputs=_extrema_inputs,
        reference=_extrema_reference,
        covers=("atomic_max", "atomic_min", "atomic_or", "return_prev"),
        **_EXACT,
    ),
    PlainKernel(
        name="tile_atomics",
        build=tile_atomics,
        inputs=_tile_inputs,
        reference=_tile_reference,
        covers=("tile atomic_add", "tile atomic_max", "tile atomic_min"),
        atol=1e-5,
    ),
    PlainKernel(
        name="packed_atomics",
        build=packed_atomics,
        inputs=lambda rng: [randn(rng, 2, 64), randn(rng, 64)],
        reference=lambda args: {1: f64(args[1]) + f64(args[0]).sum(0)},
        covers=("atomic_addx2",),
    ),
    PlainKernel(
        name="quad_atomics",
        build=quad_atomics,
        inputs=lambda rng: [randn(rng, 2, 128, dtype=_F32), randn(rng, 128, dtype=_F32), randn(rng, 8, 16, dtype=_F32)],
        reference=_quad_reference,
        covers=("atomic_addx4", "atomic_add through TMA"),
        atol=1e-5,
        targets=HOPPER_UP,
        why_not={"sm_80": "no tensor memory accelerator"},
    ),
    PlainKernel(
        name="last_block_sums",
        build=last_block_sums,
        inputs=lambda rng: [randn(rng, 4, 32, dtype=_F32), poison(4), torch.zeros(1, dtype=torch.int32), poison(1)],
        reference=lambda args: {
            1: f64(args[0]).sum(1),
            2: torch.tensor([4]),
            3: f64(args[0]).sum().reshape(1),
        },
        covers=("atomic_store", "atomic_load", "return_prev", "memory_order"),
        atol=1e-4,
    ),
    PlainKernel(
        name="spin_flag",
        build=spin_flag,
        inputs=_spin_inputs,
        reference=_spin_reference,
        covers=("atomic_load", "atomic_store", "spin wait", "blocks that wait for blocks"),
        atol=1e-6,
    ),
)
