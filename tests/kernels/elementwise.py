# SPDX-License-Identifier: MIT
"""Element-wise work: arithmetic, intrinsics, branches, casts, and index-driven access."""

import math

import torch

from .base import PlainKernel, f64, poison, randint, randn


def axpy_tail(T):
    """out = 2 x + y on a length that is not a multiple of the block, directly from and to global memory."""
    length, block = 1000, 256

    @T.prim_func
    def main(x: T.Tensor((length,), T.float32), y: T.Tensor((length,), T.float32), out: T.Tensor((length,), T.float32)):
        with T.Kernel(T.ceildiv(length, block), threads=128) as bx:
            T.annotate_min_blocks_per_sm(2)
            T.annotate_l2_hit_ratio({x: 0.5})
            T.annotate_restrict_buffers(x, out)
            for i in T.Parallel(block):
                if bx * block + i < length:
                    out[bx * block + i] = 2 * x[bx * block + i] + y[bx * block + i]

    return main


def dynamic_axpby(T):
    """A row count known only at launch, and used as a value."""
    rows, cols = T.dynamic("rows"), 64

    @T.prim_func
    def main(
        x: T.Tensor((rows, cols), T.float16),
        y: T.Tensor((rows, cols), T.float16),
        out: T.Tensor((rows, cols), T.float32),
    ):
        with T.Kernel(T.ceildiv(cols, 32), T.ceildiv(rows, 16), threads=64) as (bx, by):
            x_tile = T.alloc_shared((16, 32), T.float16)
            y_tile = T.alloc_shared((16, 32), T.float16)
            acc = T.alloc_fragment((16, 32), T.float32)
            T.copy(x[by * 16, bx * 32], x_tile)
            T.copy(y[by * 16, bx * 32], y_tile)
            for i, j in T.Parallel(16, 32):
                acc[i, j] = y_tile[i, j] * T.float32(0.5) + x_tile[i, j] * T.cast(rows, T.float32)
            T.copy(acc, out[by * 16, bx * 32])

    return main


def strided_columns(T):
    """Every other column of a wider matrix, given as a strided tensor with a symbolic row pitch."""
    pitch = T.symbolic("pitch")

    @T.prim_func
    def main(x: T.StridedTensor((16, 32), (pitch, 2), T.float32), out: T.Tensor((16, 32), T.float32)):
        with T.Kernel(2, threads=32) as bx:
            for i, j in T.Parallel(8, 32):
                out[bx * 8 + i, j] = -x[bx * 8 + i, j]

    return main


def branches(T):
    """if / elif / else inside T.Parallel, nested selects, logical operators, integer arithmetic."""

    @T.prim_func
    def main(x: T.Tensor((64, 64), T.int32), out: T.Tensor((2, 64, 64), T.int32)):
        with T.Kernel(4, threads=64) as bx:
            tile = T.alloc_fragment((16, 64), T.int32)
            result = T.alloc_fragment((16, 64), T.int32)
            T.copy(x[bx * 16, 0], tile)
            for i, j in T.Parallel(16, 64):
                if tile[i, j] > 10:
                    result[i, j] = tile[i, j] - 10
                elif tile[i, j] < -10:
                    result[i, j] = tile[i, j] // 4
                else:
                    result[i, j] = T.truncmod(tile[i, j], 4) * 100 + tile[i, j] % 4
            T.copy(result, out[0, bx * 16, 0])
            for i, j in T.Parallel(16, 64):
                inside = T.And(tile[i, j] >= -5, tile[i, j] <= 5)
                shifted = (tile[i, j] << 2) ^ (tile[i, j] & 3) | 16
                result[i, j] = T.Select(T.Or(inside, T.Not(j < 32)), shifted, T.abs(tile[i, j]) >> 1)
            T.copy(result, out[1, bx * 16, 0])

    return main


UNARY = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
}


def intrinsics(T):
    """One output plane per unary intrinsic, then pow, clamp, nested min and max, and a GELU written out."""
    planes = len(UNARY) + 4

    @T.prim_func
    def main(x: T.Tensor((16, 32), T.float32), out: T.Tensor((planes, 16, 32), T.float32)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((16, 32), T.float32)
            result = T.alloc_fragment((16, 32), T.float32)
            T.copy(x, tile)
            for i, j in T.Parallel(16, 32):
                for plane, name in enumerate(UNARY):
                    out[plane, i, j] = getattr(T, name)(tile[i, j])
            for i, j in T.Parallel(16, 32):
                result[i, j] = T.pow(tile[i, j], T.float32(1.5))
            T.copy(result, out[planes - 4, 0, 0])
            for i, j in T.Parallel(16, 32):
                result[i, j] = T.clamp(tile[i, j] - 2.0, -1.0, 1.0)
            T.copy(result, out[planes - 3, 0, 0])
            for i, j in T.Parallel(16, 32):
                result[i, j] = T.min(T.max(tile[i, j], 1.0), T.cast(j, T.float32) / 8)
            T.copy(result, out[planes - 2, 0, 0])
            for i, j in T.Parallel(16, 32):
                result[i, j] = tile[i, j] * 0.5 * (1.0 + T.erf(tile[i, j] * T.float32(math.sqrt(0.5))))
            T.copy(result, out[planes - 1, 0, 0])

    return main


def rounded_arithmetic(T):
    """Arithmetic with a stated rounding, and the fast approximations."""

    @T.prim_func
    def main(x: T.Tensor((128,), T.float32), y: T.Tensor((128,), T.float32), out: T.Tensor((8, 128), T.float32)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(128):
                out[0, i] = T.ieee_add(x[i], y[i], "rn")
                out[1, i] = T.ieee_mul(x[i], y[i], "rn")
                out[2, i] = T.ieee_fmaf(x[i], y[i], x[i], "rn")
                out[3, i] = T.ieee_fdiv(x[i], y[i], "rn")
                out[4, i] = T.ieee_fsqrt(x[i], "rn")
                out[5, i] = T.__exp(x[i])
                out[6, i] = T.__log2(y[i])
                out[7, i] = T.fast_rcp(y[i])

    return main


CAST_TYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int64")


def casts(T):
    """float32 to a narrower type and back, one output plane per type; bytes and bits of a reinterpreted word last."""
    planes = len(CAST_TYPES) + 1

    @T.prim_func
    def main(x: T.Tensor((16, 32), T.float32), out: T.Tensor((planes, 16, 32), T.float32)):
        with T.Kernel(2, threads=64) as bx:
            tile = T.alloc_fragment((8, 32), T.float32)
            T.copy(x[bx * 8, 0], tile)
            for plane, dtype in enumerate(CAST_TYPES):
                for i, j in T.Parallel(8, 32):
                    out[plane, bx * 8 + i, j] = T.cast(T.cast(tile[i, j], dtype), T.float32)
            for i, j in T.Parallel(8, 32):
                sign = T.shift_right(T.reinterpret(tile[i, j], T.uint32), T.uint32(31))
                out[planes - 1, bx * 8 + i, j] = T.cast(sign, T.float32)

    return main


def special_values(T):
    """isnan, isinf, and a where that replaces both."""

    @T.prim_func
    def main(x: T.Tensor((128,), T.float32), flags: T.Tensor((128,), T.int32), out: T.Tensor((128,), T.float32)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(128):
                flags[i] = T.cast(T.isnan(x[i]), T.int32) + 2 * T.cast(T.isinf(x[i]), T.int32)
            for i in T.Parallel(128):
                out[i] = T.if_then_else(T.isnan(x[i]), 0.0, T.clamp(x[i], -1e4, 1e4))

    return main


def _branches_reference(args):
    x = args[0].to(torch.int64)
    low, rest = torch.div(x, 4, rounding_mode="floor"), torch.fmod(x, 4) * 100 + x.remainder(4)
    first = torch.where(x > 10, x - 10, torch.where(x < -10, low, rest))
    chosen = ((x >= -5) & (x <= 5)) | (torch.arange(64) >= 32)
    return {1: torch.stack([first, torch.where(chosen, ((x << 2) ^ (x & 3)) | 16, x.abs() >> 1)])}


def _intrinsics_reference(args):
    x = f64(args[0])
    floor_of_columns = torch.minimum(x.clamp(min=1.0), torch.arange(32, dtype=torch.float64) / 8)
    gelu = torch.nn.functional.gelu(x)
    return {1: torch.stack([*(fn(x) for fn in UNARY.values()), x**1.5, (x - 2).clamp(-1, 1), floor_of_columns, gelu])}


def _rounded_reference(args):
    x, y = f64(args[0]), f64(args[1])
    return {2: torch.stack([x + y, x * y, x * y + x, x / y, x.sqrt(), x.exp(), y.log2(), 1 / y])}


def _casts_reference(args):
    x = args[0]
    planes = [f64(x.to(getattr(torch, name))) for name in CAST_TYPES]
    return {1: torch.stack([*planes, f64(torch.signbit(x))])}


def _special_inputs(rng):
    x = randn(rng, 128, dtype=torch.float32, scale=1e4)
    x[::7], x[1::11], x[2::13] = float("nan"), float("inf"), float("-inf")
    return [x, poison(128, dtype=torch.int32), poison(128)]


def _special_reference(args):
    x = f64(args[0])
    flags = x.isnan().to(torch.int64) + 2 * x.isinf().to(torch.int64)
    return {1: flags, 2: torch.where(x.isnan(), torch.zeros_like(x), x.clamp(-1e4, 1e4))}


def _strided_inputs(rng):
    return [randn(rng, 16, 80, dtype=_F32)[:, 6:70:2], poison(16, 32)]


_F32 = torch.float32

KERNELS = (
    PlainKernel(
        name="axpy_tail",
        build=axpy_tail,
        inputs=lambda rng: [randn(rng, 1000, dtype=_F32), randn(rng, 1000, dtype=_F32), poison(1000)],
        reference=lambda args: {2: 2 * f64(args[0]) + f64(args[1])},
        covers=("parallel", "tail guard"),
        atol=1e-5,
    ),
    PlainKernel(
        name="dynamic_axpby",
        build=dynamic_axpby,
        inputs=lambda rng: [randn(rng, 40, 64), randn(rng, 40, 64), poison(40, 64)],
        reference=lambda args: {2: 40 * f64(args[0]) + 0.5 * f64(args[1])},
        covers=("dynamic", "tail tiles", "cast"),
        atol=1e-3,
    ),
    PlainKernel(
        name="strided_columns",
        build=strided_columns,
        inputs=_strided_inputs,
        reference=lambda args: {1: -f64(args[0])},
        covers=("symbolic", "StridedTensor"),
        rtol=0.0,
        atol=0.0,
    ),
    PlainKernel(
        name="branches",
        build=branches,
        inputs=lambda rng: [randint(rng, -40, 40, 64, 64), poison(2, 64, 64, dtype=torch.int32)],
        reference=_branches_reference,
        covers=("if in parallel", "Select", "And", "Or", "integer arithmetic", "shift"),
        rtol=0.0,
        atol=0.0,
    ),
    PlainKernel(
        name="intrinsics",
        build=intrinsics,
        inputs=lambda rng: [torch.rand(16, 32, generator=rng) * 4 + 0.1, poison(len(UNARY) + 4, 16, 32)],
        reference=_intrinsics_reference,
        covers=(*UNARY, "pow", "clamp", "min", "max"),
        rtol=1e-4,
        atol=1e-4,
    ),
    PlainKernel(
        name="rounded_arithmetic",
        build=rounded_arithmetic,
        inputs=lambda rng: [*(torch.rand(128, generator=rng) + 0.5 for _ in range(2)), poison(8, 128)],
        reference=_rounded_reference,
        covers=("ieee_add", "ieee_fmaf", "ieee_fdiv", "__exp", "fast_rcp"),
        rtol=1e-4,
        atol=1e-4,
    ),
    PlainKernel(
        name="casts",
        build=casts,
        inputs=lambda rng: [randn(rng, 16, 32, dtype=_F32, scale=20.0), poison(len(CAST_TYPES) + 1, 16, 32)],
        reference=_casts_reference,
        covers=("cast", "reinterpret", *CAST_TYPES),
        rtol=0.0,
        atol=0.0,
    ),
    PlainKernel(
        name="special_values",
        build=special_values,
        inputs=_special_inputs,
        reference=_special_reference,
        covers=("isnan", "isinf", "if_then_else"),
        rtol=1e-6,
        atol=0.0,
    ),
)
