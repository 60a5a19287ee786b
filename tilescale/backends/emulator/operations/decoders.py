# SPDX-License-Identifier: MIT
"""Stand-ins for the C++ functions of TileLang's examples that decode packed weights, one call a thread."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilescale.backends.emulator.operations.stand_ins import stand_in

_BIAS = float(2**126)
_SIGNS_AND_VALUES = 0x81C081C0
"""Mask of two bfloat16 in a word: the sign, the low bits of the exponent, and the first bit of the mantissa."""


def _words(data: np.ndarray, count: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(-1).view(np.uint8)[: 4 * count]).view(np.uint32)


def _decode_i4(data: np.ndarray, out: np.ndarray, count: int, offset: int) -> None:
    """Elements i and i + 4 of a word of eight become neighbours."""
    (word,) = _words(data, 1).tolist()
    for i in range(count):
        out[i] = (word >> 4 * (i // 2 + 4 * (i % 2)) & 15) - offset


@stand_in("decode_i4u_to_f16")
def _decode_i4u_to_f16(data: np.ndarray, out: np.ndarray, count: int = 8) -> None:
    _decode_i4(data, out, count, 0)


@stand_in("decode_i4s_to_f16")
def _decode_i4s_to_f16(data: np.ndarray, out: np.ndarray, count: int = 8) -> None:
    _decode_i4(data, out, count, 8)


@stand_in("decode_fp4_to_bf16_twiddling")
def _decode_fp4_to_bf16_twiddling(data: np.ndarray, out: np.ndarray, words: int = 8) -> None:
    """Decode the eight elements of a word in Triton's twiddled order: three by a shift each, the last in pieces."""
    word = _words(data, words).byteswap()
    pieces = (word << 1) & 0x80008000 | (word >> 3) & 0x01800180 | (word >> 7) & 0x00400040
    parts = [word & _SIGNS_AND_VALUES, (word << 3) & _SIGNS_AND_VALUES, (word << 6) & _SIGNS_AND_VALUES, pieces]
    halves = np.stack(parts, axis=-1).astype(np.uint32)
    both = np.concatenate([halves >> 16, halves & 0xFFFF], axis=-1).astype(np.uint16).view(ml_dtypes.bfloat16)
    out[: 8 * words] = (both.astype(np.float32) * _BIAS).astype(ml_dtypes.bfloat16).reshape(-1)
