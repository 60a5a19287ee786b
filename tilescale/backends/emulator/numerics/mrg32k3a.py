# SPDX-License-Identifier: MIT
"""The MRG32k3a generator of cuRAND's device functions: L'Ecuyer, "Good parameters and implementations for combined
multiple recursive random number generators", 1999.

Sequences are 2^76 numbers apart. A step is linear, so that n steps are the n-th power of a matrix.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tilescale.backends.emulator.numerics.random import TWO_PI, Generators

_MODULI = 4294967087, 4294944443
_RECURRENCES = (0, 1403580, -810728), (527612, 0, -1370589)
"""Factors of the last three values, the latest first."""
_APART = 76
_SEED = 12345
_SALT = np.uint64(0x55555555), np.uint64(0xAAAAAAAA)
_NORM = 2.3283065498378288e-10
_TO_BITS = 1.000000048662
_LOW = np.uint64(0xFFFFFFFF)


class Mrg32k3a(Generators):
    """The last three values of two recurrences."""

    def __init__(self, count: int):
        super().__init__(count)
        self.state = np.zeros((2, 3, count), np.uint64)

    def _start(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        low, high = (seed & _LOW) ^ _SALT[0], (seed >> np.uint64(32)) ^ _SALT[1]
        one = np.ones_like(seed)
        mixed = np.array([[low, high, low], [high, low, high]])
        factors = np.where(seed == 0, one, mixed)
        for number, modulus in enumerate(_MODULI):
            state = factors[number] * np.uint64(_SEED) % np.uint64(modulus)
            self.state[number][:, which] = _ahead(_ahead(state, number, sequence, _APART), number, offset, 0)

    def _numbers(self, which: np.ndarray) -> np.ndarray:
        """The next values, in [1, 4294967087]; float64."""
        for number in range(2):
            self.state[number][:, which] = _times(_power(number, 0), self.state[number][:, which], number)
        first, second = self.state[:, -1].astype(np.float64)
        return np.where(first <= second, first - second + _MODULI[0], first - second)

    def words(self, which: np.ndarray) -> np.ndarray:
        """The next word of each generator of a mask."""
        return (self._numbers(which) * _TO_BITS).astype(np.uint32)

    def uniform(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return (self._numbers(which) * _NORM).astype(dtype)

    def _fine(self, which: np.ndarray) -> np.ndarray:
        return self._numbers(which) * _NORM

    def _angle(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return self.uniform(which, dtype) * (TWO_PI if dtype == np.float32 else 2 * np.pi)


@cache
def _power(number: int, exponent: int) -> tuple[tuple[int, ...], ...]:
    """The matrix of 2^exponent steps of a recurrence."""
    modulus = _MODULI[number]
    if exponent == 0:
        return (0, 1, 0), (0, 0, 1), tuple(factor % modulus for factor in reversed(_RECURRENCES[number]))
    half = _power(number, exponent - 1)
    return tuple(tuple(sum(a * b for a, b in zip(row, column, strict=True)) % modulus
                       for column in zip(*half, strict=True)) for row in half)  # fmt: skip


def _times(matrix: tuple[tuple[int, ...], ...], state: np.ndarray, number: int) -> np.ndarray:
    modulus = np.uint64(_MODULI[number])
    factors = np.array(matrix, np.uint64)
    return (factors[:, :, None] * state[None] % modulus).sum(axis=1, dtype=np.uint64) % modulus


def _ahead(state: np.ndarray, number: int, steps: np.ndarray, scale: int) -> np.ndarray:
    """The states of a recurrence after `steps` * 2^scale steps."""
    state = state.copy()
    for place in range(int(steps.max(initial=0)).bit_length()):
        some = (steps >> np.uint64(place)) & np.uint64(1) == 1
        state[:, some] = _times(_power(number, scale + place), state[:, some], number)
    return state
