# SPDX-License-Identifier: MIT
"""Code written per thread: indices, registers, while loops, barriers of the block and of the grid."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def block_tree_sum(T):
    """A shared-memory tree whose stride is halved by a while loop."""
    threads = 64

    @T.prim_func
    def main(x: T.Tensor((4, 128), T.float32), out: T.Tensor((4,), T.float32)):
        with T.Kernel(4, threads=threads) as bx:
            tx = T.get_thread_binding()
            partial = T.alloc_shared((threads,), T.float32)
            stride = T.alloc_var(T.int32, init=threads // 2)
            partial[tx] = x[bx, tx] + x[bx, tx + threads]
            T.sync_threads()
            while stride > 0:
                if tx < stride:
                    partial[tx] = partial[tx] + partial[tx + stride]
                T.sync_threads()
                stride = stride // 2
            if tx == 0:
                out[bx] = partial[0]

    return main


def collatz(T):
    """Each thread counts the steps of its own number: a while loop that ends at a different time in every lane."""

    @T.prim_func
    def main(x: T.Tensor((32,), T.int32), out: T.Tensor((32,), T.int32)):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            value = T.alloc_var(T.int32, init=0)
            steps = T.alloc_var(T.int32, init=0)
            value = x[tx]
            while value != 1:
                if value % 2 == 0:
                    value = value // 2
                else:
                    value = 3 * value + 1
                steps = steps + 1
            out[tx] = steps

    return main


def first_match(T):
    """The first position of a key in each row, by a serial loop that breaks; -1 where there is none."""
    length = 16

    @T.prim_func
    def main(rows: T.Tensor((32, length), T.int32), keys: T.Tensor((32,), T.int32), out: T.Tensor((32,), T.int32)):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            found = T.alloc_var(T.int32, init=-1)
            for i in T.serial(length):
                if rows[tx, i] == keys[tx]:
                    found = i
                    T.loop_break()
            out[tx] = found

    return main


def vector_registers(T):
    """Eight halves a thread through local memory with vectorised loops; steps and reversed order in serial loops."""
    width = 8

    @T.prim_func
    def main(x: T.Tensor((2, 32 * width), T.float16), out: T.Tensor((2, 32 * width), T.float16)):
        with T.Kernel(2, threads=32) as bx:
            tx = T.get_thread_binding()
            regs = T.alloc_local((width,), T.float16)
            turned = T.alloc_local((width,), T.float16)
            for v in T.vectorized(width):
                regs[v] = x[bx, tx * width + v]
            for v in T.serial(width):
                turned[v] = regs[width - 1 - v]
            for v in T.serial(0, width, 2):
                turned[v] = turned[v] * T.float16(2)
            for v in T.unroll(1, width, 2):
                turned[v] = turned[v] - T.float16(1)
            for v in T.vectorized(width):
                out[bx, tx * width + v] = turned[v]

    return main


def thread_grid(T):
    """Two thread dimensions and two grid dimensions, with the extents read back."""

    @T.prim_func
    def main(out: T.Tensor((8, 32), T.int32)):
        with T.Kernel(2, 2, threads=(16, 4)) as (bx, by):
            tx, ty = T.get_thread_bindings()[:2]
            row = by * T.get_thread_extent(1) + ty
            column = bx * T.get_thread_extent(0) + tx
            out[row, column] = row * 100 + column + T.get_block_extent(0) * 10000

    return main


def int8_dot(T):
    """Four-element int8 dot products, one output a thread."""
    length = 32

    @T.prim_func
    def main(a: T.Tensor((32, length), T.int8), b: T.Tensor((32, length), T.int8), out: T.Tensor((32,), T.int32)):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            a_regs = T.alloc_local((4,), T.int8)
            b_regs = T.alloc_local((4,), T.int8)
            acc = T.alloc_local((1,), T.int32)
            acc[0] = 0
            for i in T.serial(length // 4):
                for v in T.vectorized(4):
                    a_regs[v] = a[tx, i * 4 + v]
                    b_regs[v] = b[tx, i * 4 + v]
                T.dp4a(a_regs, b_regs, acc)
            out[tx] = acc[0]

    return main


def grid_barrier(T):
    """Every block publishes its sum; after the grid-wide barrier every block normalises by the sum of all."""
    blocks, width = 4, 64

    @T.prim_func
    def main(
        x: T.Tensor((blocks, width), T.float32),
        sums: T.Tensor((blocks,), T.float32),
        out: T.Tensor((blocks, width), T.float32),
    ):
        with T.Kernel(blocks, threads=width) as bx:
            tx = T.get_thread_binding()
            total = T.alloc_var(T.float32, init=0.0)
            partial = T.alloc_shared((2,), T.float32)
            warp_sum = T.warp_reduce_sum(x[bx, tx])
            if tx % 32 == 0:
                partial[tx // 32] = warp_sum
            T.sync_threads()
            if tx == 0:
                sums[bx] = partial[0] + partial[1]
            T.sync_grid()
            for other in T.serial(blocks):
                total = total + sums[other]
            out[bx, tx] = x[bx, tx] / total

    return main


def _collatz_reference(args):
    counts = []
    for value in args[0].tolist():
        steps = 0
        while value != 1:
            value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
        counts.append(steps)
    return {1: torch.tensor(counts)}


def _match_reference(args):
    rows, keys = args[0].tolist(), args[1].tolist()
    return {2: torch.tensor([row.index(key) if key in row else -1 for row, key in zip(rows, keys, strict=True)])}


def _vector_reference(args):
    x = f64(args[0]).reshape(2, 32, 4, 2).flip(2, 3)
    return {1: torch.stack([x[..., 0] * 2, x[..., 1] - 1], -1).reshape(2, 256)}


def _match_inputs(rng):
    return [randint(rng, 0, 12, 32, 16), randint(rng, 0, 12, 32), poison(32, dtype=torch.int32)]


def rows_of_threads(T):
    """Each thread copies a row of its own, from device and from shared memory, into registers and back."""

    @T.prim_func
    def main(x: T.Tensor((32, 16), T.float16), out: T.Tensor((2, 32, 16), T.float16)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((32, 16), T.float16)
            row = T.alloc_local((16,), T.float16)
            T.copy(x, tile)
            if tx < 32:
                T.copy(x[tx, 0:16], row)
                T.copy(row, out[0, 31 - tx, 0:16])
                T.copy(tile[tx, 0:16], row)
                T.copy(row, out[1, tx, 0:16])

    return main


def private_tile_added(T):
    """A copy into registers that all threads hold alike, added up by atomics."""

    @T.prim_func
    def main(x: T.Tensor((4, 2), T.float32), out: T.Tensor((2,), T.float32)):
        with T.Kernel(4, threads=32) as bx:
            both = T.alloc_local([2], T.float32)
            T.copy(x[bx, 0:2], both)
            both[1] = both[1] * 2.0
            T.atomic_add(out, both)

    return main


_F32, _I32, _I8 = torch.float32, torch.int32, torch.int8
_EXACT = {"rtol": 0.0, "atol": 0.0}

KERNELS = (
    PlainKernel(
        name="block_tree_sum",
        build=block_tree_sum,
        inputs=lambda rng: [randn(rng, 4, 128, dtype=_F32), poison(4)],
        reference=lambda args: {1: f64(args[0]).sum(1)},
        covers=("while", "sync_threads", "get_thread_binding", "alloc_shared"),
        atol=1e-4,
    ),
    PlainKernel(
        name="collatz",
        build=collatz,
        inputs=lambda rng: [randint(rng, 1, 40, 32), poison(32, dtype=_I32)],
        reference=_collatz_reference,
        covers=("while", "divergence", "alloc_var"),
        **_EXACT,
    ),
    PlainKernel(
        name="first_match",
        build=first_match,
        inputs=_match_inputs,
        reference=_match_reference,
        covers=("loop_break", "alloc_var"),
        **_EXACT,
    ),
    PlainKernel(
        name="vector_registers",
        build=vector_registers,
        inputs=lambda rng: [randn(rng, 2, 256), poison(2, 256, dtype=torch.float16)],
        reference=_vector_reference,
        covers=("alloc_local", "vectorized", "unroll", "serial with step"),
        rtol=1e-3,
        atol=1e-3,
    ),
    PlainKernel(
        name="thread_grid",
        build=thread_grid,
        inputs=lambda rng: [poison(8, 32, dtype=_I32)],
        reference=lambda args: {0: torch.arange(8)[:, None] * 100 + torch.arange(32) + 20000},
        covers=("get_thread_bindings", "get_thread_extent", "get_block_extent"),
        **_EXACT,
    ),
    PlainKernel(
        name="int8_dot",
        build=int8_dot,
        inputs=lambda rng: [*(randint(rng, -100, 100, 32, 32, dtype=_I8) for _ in range(2)), poison(32, dtype=_I32)],
        reference=lambda args: {2: (args[0].to(torch.int64) * args[1].to(torch.int64)).sum(1)},
        covers=("dp4a", "alloc_local", "vectorized"),
        **_EXACT,
    ),
    PlainKernel(
        name="grid_barrier",
        build=grid_barrier,
        inputs=lambda rng: [torch.rand(4, 64, generator=rng), poison(4), poison(4, 64)],
        reference=lambda args: {1: f64(args[0]).sum(1), 2: f64(args[0]) / f64(args[0]).sum()},
        covers=("sync_grid", "warp_reduce_sum"),
        atol=1e-4,
    ),
    PlainKernel(
        name="rows_of_threads",
        build=rows_of_threads,
        inputs=lambda rng: [randn(rng, 32, 16), poison(2, 32, 16, dtype=torch.float16)],
        reference=lambda args: {1: torch.stack([f64(args[0]).flip(0), f64(args[0])])},
        covers=("alloc_local", "copy of a thread"),
        **_EXACT,
    ),
    PlainKernel(
        name="private_tile_added",
        build=private_tile_added,
        inputs=lambda rng: [randn(rng, 4, 2, dtype=_F32), torch.zeros(2)],
        reference=lambda args: {1: f64(args[0]).sum(0) * torch.tensor([1.0, 2.0])},
        covers=("alloc_local", "atomic_add"),
        atol=1e-5,
    ),
)
