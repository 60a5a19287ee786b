# SPDX-License-Identifier: MIT
"""Programs of calibrations: transfers, flags, launches, GEMMs, collectives."""

# No postponed annotations here: TileLang evaluates those of a traced function where its closure is not known.

from typing import Any

import tilescale.language as T
from tilescale.hda import Machine

TILE = 32 << 10
"""Bytes of a tile that a program sends."""

THREADS = 512
"""Threads of a program that moves data."""

BLOCK = (128, 256, 64)
"""Tile of a GEMM, (m, n), and the depth of a step."""


def launch(machine: Machine, units: int) -> Any:
    """One program on each unit, which does next to nothing."""
    level, program = machine.tensor_level.name, machine.program_level.name

    @T.prim_func
    def nothing(X: T.Tensor((32,), "float32")):
        with T.Kernel(**{level: units, program: 1}, threads=32):
            with T.Scale(program):
                for i in T.Parallel(32):
                    X[i] = 0.0

    return nothing


def whole_copy(machine: Machine, units: int, nbytes: int, impl: str) -> Any:
    """Every unit copies a tensor to the next one."""
    level = machine.tensor_level.name

    @T.prim_func
    def copy(X: T.Tensor((nbytes,), "uint8"), Y: T.Tensor((nbytes,), "uint8")):
        with T.Kernel(**{level: units}):
            with T.Scale(level) as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size, impl=impl)

    return copy


def tile_copies(machine: Machine, units: int, operation: str, programs: int, steps: int, impl: str) -> Any:
    """Programs of every unit put tiles into the next one's memory, or get them from there."""
    level, program, n = machine.tensor_level.name, machine.program_level.name, TILE // 2

    @T.prim_func
    def copies(X: T.Tensor((programs, steps, n), "bfloat16"), Y: T.Tensor((programs, steps, n), "bfloat16")):
        with T.Kernel(**{level: units, program: programs}, threads=THREADS) as b:
            with T.Scale(program):
                tile = T.alloc_shared((n,), "bfloat16")
                for i in T.Pipelined(steps, num_stages=3):
                    if operation == "put":
                        T.copy(X[b, i, 0], tile)
                        with T.Scale(level) as (rank, size):
                            T.copy(tile, Y[b, i, 0], dst=(rank + 1) % size, impl=impl)
                    else:
                        with T.Scale(level) as (rank, size):
                            T.copy(X[b, i, 0], tile, src=(rank + 1) % size, impl=impl)
                        T.copy(tile, Y[b, i, 0])

    return copies


def flags(machine: Machine, units: int, rounds: int) -> Any:
    """A signal passes one program of every unit, round after round; unit 0 begins.

    No unit signals before its last signal has arrived: a release waits for earlier writes.
    """
    level, program = machine.tensor_level.name, machine.program_level.name

    @T.prim_func
    def signals(X: T.Tensor((32,), "float32")):
        with T.Kernel(**{level: units, program: 1}, threads=32):
            flag = T.alloc_flags((1,))
            with T.Scale(program), T.Scale(level) as (rank, size):
                for i in T.serial(rounds):
                    T.wait(flag[0], ">=", i + T.min(rank, 1))
                    T.signal(flag[0], dst=(rank + 1) % size)
                T.wait(flag[0], ">=", rounds)

    return signals


def collective(machine: Machine, units: int, operation: str, n: int, impl: str | None) -> Any:
    """A collective of whole tensors; `n` elements in all: the result of a gather, a unit's own elsewhere."""
    level, part = machine.tensor_level.name, n // units
    if operation in ("allreduce", "broadcast"):
        return _in_place(level, units, operation, n, impl)
    mine, result = (part if operation == "all_gather" else n), (part if operation == "reduce_scatter" else n)

    @T.prim_func
    def between(X: T.Tensor((mine,), "bfloat16"), Y: T.Tensor((result,), "bfloat16")):
        with T.Kernel(**{level: units}):
            with T.Scale(level):
                if operation == "all_gather":
                    T.all_gather(X, Y, impl=impl)
                elif operation == "reduce_scatter":
                    T.reduce_scatter(X, Y, impl=impl)
                else:
                    T.all_to_all(X, Y, impl=impl)

    return between


def _in_place(level: str, units: int, operation: str, n: int, impl: str | None) -> Any:
    @T.prim_func
    def in_place(X: T.Tensor((n,), "bfloat16")):
        with T.Kernel(**{level: units}):
            with T.Scale(level):
                if operation == "allreduce":
                    T.allreduce(X, impl=impl)
                else:
                    T.broadcast(X, impl=impl)

    return in_place


@T.macro
def tile_of_gemm(A, B, C, bx, by, depth):
    """One tile of C = A B, by the program at (bx, by)."""
    m, n, k = BLOCK
    a = T.alloc_shared((m, k), "bfloat16")
    b = T.alloc_shared((k, n), "bfloat16")
    c = T.alloc_fragment((m, n), "float32")
    T.clear(c)
    for i in T.Pipelined(T.ceildiv(depth, k), num_stages=4):
        T.copy(A[by * m, i * k], a)
        T.copy(B[i * k, bx * n], b)
        T.gemm(a, b, c)
    T.copy(c, C[by * m, bx * n])


def product(machine: Machine, units: int, shape: tuple[int, int, int], copied: int = 0, impl: str | None = None) -> Any:
    """A GEMM on every unit; while `copied` bytes go to the next unit, if any do."""
    level, program, (M, N, K) = machine.tensor_level.name, machine.program_level.name, shape

    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
        X: T.Tensor((max(copied, 16),), "uint8"),
        Y: T.Tensor((max(copied, 16),), "uint8"),
    ):
        with T.Kernel(**{level: units, program: tiles(M, N)}, threads=256) as (bx, by):
            done = T.alloc_flags((1,))
            with T.Scale(level) as (rank, size):
                if copied:
                    T.copy(X, Y, dst=(rank + 1) % size, signal=done[0], impl=impl)
            with T.Scale(program):
                tile_of_gemm(A, B, C, bx, by, K)

    return gemm


def gather_and_gemm(machine: Machine, units: int, shape: tuple[int, int, int]) -> Any:
    """Rows of A are split over the units; every unit gathers them and multiplies."""
    level, program, (M, N, K) = machine.tensor_level.name, machine.program_level.name, shape

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((M // units, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        G: T.Tensor((M, K), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(**{level: units, program: tiles(M, N)}, threads=256) as (bx, by):
            with T.Scale(level):
                T.all_gather(A, G)
            with T.Scale(program):
                tile_of_gemm(G, B, C, bx, by, K)

    return ag_gemm


def gemm_and_scatter(machine: Machine, units: int, shape: tuple[int, int, int]) -> Any:
    """Every unit multiplies its columns of A; the sum's rows end over the units."""
    level, program, (M, N, K) = machine.tensor_level.name, machine.program_level.name, shape

    @T.prim_func
    def gemm_rs(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((M // units, N), "bfloat16"),
    ):
        with T.Kernel(**{level: units, program: tiles(M, N)}, threads=256) as (bx, by):
            P = T.alloc_global((M, N), "bfloat16")
            with T.Scale(program):
                tile_of_gemm(A, B, P, bx, by, K)
            with T.Scale(level):
                T.reduce_scatter(P, C)

    return gemm_rs


def gemm_and_sum(machine: Machine, units: int, shape: tuple[int, int, int]) -> Any:
    """Every unit multiplies its columns of A; the sum ends on every unit."""
    level, program, (M, N, K) = machine.tensor_level.name, machine.program_level.name, shape

    @T.prim_func
    def gemm_ar(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")):
        with T.Kernel(**{level: units, program: tiles(M, N)}, threads=256) as (bx, by):
            with T.Scale(program):
                tile_of_gemm(A, B, C, bx, by, K)
            with T.Scale(level):
                T.allreduce(C)

    return gemm_ar


def tiles(M: int, N: int) -> tuple[int, int]:
    """Programs along the columns and rows of a GEMM."""
    m, n, _ = BLOCK
    return -(-N // n), -(-M // m)
