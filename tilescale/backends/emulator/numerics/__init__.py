# SPDX-License-Identifier: MIT
"""Arithmetic of tile operations, as functions on numpy arrays; no IR, no scheduling, no simulated time.

Overflow, NaN and division by zero have the results of the hardware. numpy warns of them: callers enter
`np.errstate(all="ignore")` once, around a whole run.
"""

from tilescale.backends.emulator.numerics.atomics import atomic_update
from tilescale.backends.emulator.numerics.dtypes import (
    as_compute,
    convert,
    element_type,
    from_numpy,
    is_float,
    is_half_byte,
    lane_axis,
    lanes_of,
    numpy_dtype,
    tf32,
    to_numpy,
    wrap,
)
from tilescale.backends.emulator.numerics.elementwise import BINARY, select
from tilescale.backends.emulator.numerics.gemm import decompress_2to4, gemm, gemm_blockscaled, gemm_sparse
from tilescale.backends.emulator.numerics.im2col import im2col
from tilescale.backends.emulator.numerics.intrinsics import INTRINSICS
from tilescale.backends.emulator.numerics.reduce import combine_ufunc, identity, reduce, reduce_many, scan
from tilescale.backends.emulator.numerics.warp import match_all, match_any, shfl, vote, warp_reduce

__all__ = [
    "BINARY",
    "INTRINSICS",
    "as_compute",
    "atomic_update",
    "combine_ufunc",
    "convert",
    "decompress_2to4",
    "element_type",
    "from_numpy",
    "gemm",
    "gemm_blockscaled",
    "gemm_sparse",
    "identity",
    "im2col",
    "is_float",
    "is_half_byte",
    "lane_axis",
    "lanes_of",
    "match_all",
    "match_any",
    "numpy_dtype",
    "reduce",
    "reduce_many",
    "scan",
    "select",
    "shfl",
    "tf32",
    "to_numpy",
    "vote",
    "warp_reduce",
    "wrap",
]
