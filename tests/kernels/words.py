# SPDX-License-Identifier: MIT
"""Vector and word operations of threads: ramps, wide loads, cp.async, ldmatrix, exchanges by their TVM names."""

import numpy as np
import torch

from tilescale.backends.emulator.numerics.random import philox

from .base import PlainKernel, f64, poison, randint, randn


def vectors(T):
    """Ramps and broadcasts: four elements at once, one of them in reverse order."""

    @T.prim_func
    def main(x: T.Tensor((64,), T.float32), out: T.Tensor((2, 64), T.float32)):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            four = T.alloc_local((4,), T.float32)
            four[0:4] = x[tx * 4 : tx * 4 + 4]
            out[0, T.Ramp(tx * 4, 1, 4)] = four[T.Ramp(0, 1, 4)] * T.Broadcast(T.float32(2), 4)
            out[1, T.Ramp(tx * 4, 1, 4)] = four[T.Ramp(3, -1, 4)]

    return main


def words(width: int):
    """Loads and stores of one width, some of them under a predicate; loads that are left out give zero."""
    count, threads = width // 16, 32

    def build(T):
        load, store = getattr(T, f"ldg{width}"), getattr(T, f"stg{width}")

        @T.prim_func
        def main(x: T.Tensor((threads, count), T.float16), out: T.Tensor((2, threads, count), T.float16)):
            with T.Kernel(1, threads=threads):
                tx = T.get_thread_binding()
                store(out[0, tx, 0:count], load(x[tx, 0:count], pred=tx < 5))
                store(out[1, tx, 0:count], load(x[tx, 0:count]), pred=tx >= 2)

        return main

    def reference(args):
        x, rows = f64(args[0]), torch.arange(threads)[:, None]
        return {1: torch.stack([torch.where(rows < 5, x, 0), torch.where(rows >= 2, x, 1)])}

    return PlainKernel(
        name=f"words_of_{width}_bits",
        build=build,
        inputs=lambda rng: [randn(rng, threads, count), torch.ones(2, threads, count, dtype=torch.float16)],
        reference=reference,
        covers=(f"ldg{width}", f"stg{width}"),
        **({"targets": ("sm_100a",), "why_not": _NO_256} if width == 256 else {}),
        **_EXACT,
    )


def shared_words(T):
    """Words in a register of four lanes, through shared memory, and seen as another type."""

    @T.prim_func
    def main(x: T.Tensor((64,), T.float32), out: T.Tensor((64,), T.float32)):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((64,), T.float32)
            T.sts128(tile[tx * 4], T.ldg128(x[tx * 4 : tx * 4 + 4]))
            T.sync_threads()
            out[T.Ramp(tx * 4, 1, 4)] = T.reinterpret(T.lds128(tile[(15 - tx) * 4]), "float32x4")

    return main


def copied_words(T):
    """cp.async: 16 bytes a thread, zeros where the predicate does not hold."""

    @T.prim_func
    def main(x: T.Tensor((16, 8), T.float16), out: T.Tensor((16, 8), T.float16)):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((16, 8), T.float16)
            T.ptx_cp_async(
                T.access_ptr(tile[tx, 0], "w", 8), T.access_ptr(x[tx, 0], "r", 8), 8, predicate=tx % 2 == 0
            )
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            for i in T.serial(8):
                out[tx, i] = tile[15 - tx, i]

    return main


def matrices(transpose: bool):
    """ldmatrix: thread t gets elements 2 (t % 4) and the next of row t // 4 of each 8 x 8 matrix."""

    def build(T):
        @T.prim_func
        def main(x: T.Tensor((32, 8), T.float16), out: T.Tensor((32, 8), T.float16)):
            with T.Kernel(1, threads=32):
                tx = T.get_thread_binding()
                tile = T.alloc_shared((32, 8), T.float16)
                mine = T.alloc_local((8,), T.float16)
                T.copy(x, tile)
                T.ptx_ldmatrix(transpose, 4, T.access_ptr(tile[tx, 0], "r", 8), T.access_ptr(mine[0], "w", 8))
                for i in T.serial(8):
                    out[tx, i] = mine[i]

        return main

    def reference(args):
        four = f64(args[0]).reshape(4, 8, 8)
        four = four.transpose(1, 2) if transpose else four
        return {1: four.reshape(4, 32, 2).transpose(0, 1).reshape(32, 8)}

    return PlainKernel(
        name=f"matrices{'_transposed' if transpose else ''}_of_a_warp",
        build=build,
        inputs=lambda rng: [randn(rng, 32, 8), poison(32, 8, dtype=torch.float16)],
        reference=reference,
        covers=("ptx_ldmatrix",),
        **_EXACT,
    )


def tvm_shuffles(T):
    @T.prim_func
    def main(x: T.Tensor((32,), T.int32), out: T.Tensor((3, 32), T.int32)):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            out[0, tx] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), x[tx], 5, 32, 32)
            out[1, tx] = T.tvm_warp_shuffle_up(T.uint32(0xFFFFFFFF), x[tx], 1, 32, 32)
            out[2, tx] = T.tvm_warp_shuffle_down(T.uint32(0xFFFFFFFF), x[tx], 2, 32, 32)

    return main


def row_of_threads_sum(T):
    """The end of TileLang's matrix-vector products: the threads of a row sum up, and all of them have the result."""

    @T.prim_func
    def main(x: T.Tensor((4, 32), T.float32), out: T.Tensor((4, 32), T.float32)):
        with T.Kernel(1, threads=(32, 4)):
            tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
            mine = T.alloc_local((1,), T.float32)
            total = T.alloc_local((1,), T.float32)
            mine[0] = x[ty, tx]
            with T.attr(
                T.comm_reducer(lambda a, b: a + b, [T.Cast(T.float32, 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), mine[0], True, total[0], tx, dtype="handle"))
            out[ty, tx] = total[0]

    return main


def fragment_reducer(T):
    """A reducer of TileLang's first kind, a fragment that each iteration adds to."""

    @T.prim_func
    def main(x: T.Tensor((16, 24), T.float32), out: T.Tensor((16,), T.float32)):
        with T.Kernel(1, threads=32):
            result = T.alloc_reducer((16,), T.float32, op="sum", replication="all")
            T.fill(result, 0)
            for step in T.serial(3):
                for i, j in T.Parallel(16, 8):
                    result[i] += x[i, step * 8 + j]
            T.finalize_reducer(result)
            T.copy(result, out)

    return main


def random_words(T):
    """Each thread draws from a stream of its own."""

    @T.prim_func
    def main(out: T.Tensor((64, 4), T.uint32)):
        with T.Kernel(2, threads=32) as bx:
            row = bx * 32 + T.get_thread_binding()
            T.rng_init(42, row, 0)
            for i in T.serial(4):
                out[row, i] = T.rng_rand()

    return main


def _drawn(_args):
    counters, keys = np.zeros((4, 64), np.uint32), np.zeros((2, 64), np.uint32)
    counters[2], keys[0] = np.arange(64), 42
    return {0: torch.from_numpy(philox(counters, keys).T.astype(np.int64))}


def _shuffled(args):
    x = args[0].to(torch.int64)
    return {1: torch.stack([x[5].expand(32), torch.cat([x[:1], x[:-1]]), torch.cat([x[2:], x[-2:]])])}


_EXACT = {"rtol": 0.0, "atol": 0.0}
_NO_256 = {"sm_80": "no words of 256 bits", "sm_90a": "no words of 256 bits"}

KERNELS = (
    PlainKernel(
        name="vectors",
        build=vectors,
        inputs=lambda rng: [randn(rng, 64, dtype=torch.float32), poison(2, 64)],
        reference=lambda args: {
            1: torch.stack([f64(args[0]) * 2, f64(args[0]).reshape(16, 4).flip(1).reshape(-1)]),
        },
        covers=("Ramp", "Broadcast"),
        **_EXACT,
    ),
    *map(words, (32, 64, 128, 256)),
    PlainKernel(
        name="words_in_shared_memory",
        build=shared_words,
        inputs=lambda rng: [randn(rng, 64, dtype=torch.float32), poison(64)],
        reference=lambda args: {1: f64(args[0]).reshape(16, 4).flip(0).reshape(-1)},
        covers=("ldg128", "sts128", "lds128", "reinterpret"),
        **_EXACT,
    ),
    PlainKernel(
        name="copied_words",
        build=copied_words,
        inputs=lambda rng: [randn(rng, 16, 8), poison(16, 8, dtype=torch.float16)],
        reference=lambda args: {1: (f64(args[0]) * (torch.arange(16)[:, None] % 2 == 0)).flip(0)},
        covers=("ptx_cp_async", "ptx_commit_group", "ptx_wait_group"),
        **_EXACT,
    ),
    *map(matrices, (False, True)),
    PlainKernel(
        name="tvm_shuffles",
        build=tvm_shuffles,
        inputs=lambda rng: [randint(rng, -99, 99, 32), poison(3, 32, dtype=torch.int32)],
        reference=_shuffled,
        covers=("tvm_warp_shuffle", "tvm_warp_shuffle_up", "tvm_warp_shuffle_down"),
        **_EXACT,
    ),
    PlainKernel(
        name="row_of_threads_sum",
        build=row_of_threads_sum,
        inputs=lambda rng: [randn(rng, 4, 32, dtype=torch.float32), poison(4, 32)],
        reference=lambda args: {1: f64(args[0]).sum(1, keepdim=True).expand(4, 32)},
        covers=("tvm_thread_allreduce", "comm_reducer"),
        atol=1e-5,
    ),
    PlainKernel(
        name="fragment_reducer",
        build=fragment_reducer,
        inputs=lambda rng: [randn(rng, 16, 24, dtype=torch.float32), poison(16)],
        reference=lambda args: {1: f64(args[0]).sum(1)},
        covers=("alloc_reducer", "finalize_reducer"),
        atol=1e-5,
    ),
    PlainKernel(
        name="random_words",
        build=random_words,
        inputs=lambda rng: [torch.zeros(64, 4, dtype=torch.uint32)],
        reference=_drawn,
        covers=("rng_init", "rng_rand"),
        **_EXACT,
    ),
)
