# SPDX-License-Identifier: MIT
"""The XORWOW generator of cuRAND's device functions: Marsaglia, "Xorshift RNGs", 2003, plus a Weyl sequence.

Sequences are 2^67 words apart. A step is linear over bits, so that n steps are the n-th power of a matrix of bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tilescale.backends.emulator.numerics.random import Generators

_WORDS, _BITS = 5, 160
_APART = 67
_PLACES = np.arange(32, dtype=np.uint32)[None, :, None]
_WEYL = np.uint32(362437)
_SALT = np.uint32(0xAAD26B49), np.uint32(0xF7DCEFDD)
_MIX = np.uint32(1099087573), np.uint32(2591861531)
_FIRST = tuple(map(np.uint32, (123456789, 362436069, 521288629, 88675123, 5783321, 6615241)))


class Xorwow(Generators):
    """Five words that are shifted, and a counter."""

    def __init__(self, count: int):
        super().__init__(count)
        self.state = np.zeros((_WORDS, count), np.uint32)
        self.counter = np.zeros(count, np.uint32)

    def _start(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        low = (seed.astype(np.uint32) ^ _SALT[0]) * _MIX[0]
        high = ((seed >> np.uint64(32)).astype(np.uint32) ^ _SALT[1]) * _MIX[1]
        a, b, c, d, e, count = _FIRST
        state = np.stack([a + low, b ^ low, c + high, d ^ high, e + low])
        self.state[:, which] = _ahead(_ahead(state, sequence, _APART), offset, 0)
        self.counter[which] = count + high + low + _WEYL * offset.astype(np.uint32)

    def words(self, which: np.ndarray) -> np.ndarray:
        """The next word of each generator of a mask."""
        self.state[:, which] = _stepped(self.state[:, which])
        self.counter[which] += _WEYL
        return self.state[-1] + self.counter


def _stepped(state: np.ndarray) -> np.ndarray:
    first, last = state[0] ^ (state[0] >> np.uint32(2)), state[-1]
    added = (last ^ (last << np.uint32(4))) ^ (first ^ (first << np.uint32(1)))
    return np.concatenate([state[1:], added[None]])


def _bits(state: np.ndarray) -> np.ndarray:
    """The bits of states, a row for each; float32, as products of such matrices are fast."""
    return ((state[:, None] >> _PLACES) & np.uint32(1)).reshape(_BITS, -1).astype(np.float32)


def _packed(bits: np.ndarray) -> np.ndarray:
    return (bits.reshape(_WORDS, 32, -1).astype(np.uint32) << _PLACES).sum(axis=1, dtype=np.uint32)


@cache
def _power(exponent: int) -> np.ndarray:
    """The matrix of 2^exponent steps: bits after them by bits before."""
    if exponent == 0:
        return _bits(_stepped(_packed(np.eye(_BITS))))
    half = _power(exponent - 1)
    return half @ half % 2


def _ahead(state: np.ndarray, steps: np.ndarray, scale: int) -> np.ndarray:
    """The states after `steps` * 2^scale steps."""
    bits = _bits(state)
    for place in range(int(steps.max(initial=0)).bit_length()):
        some = (steps >> np.uint64(place)) & np.uint64(1) == 1
        bits[:, some] = _power(scale + place) @ bits[:, some] % 2
    return _packed(bits)
