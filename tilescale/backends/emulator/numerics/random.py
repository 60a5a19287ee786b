# SPDX-License-Identifier: MIT
"""Random numbers as cuRAND's device functions give them, for many generators at once; and its Philox4x32-10.

The cuRAND guide, section "Device API Overview", defines states by seed, sequence and offset, and numbers by words of 32
bits. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, defines Philox.
"""

from __future__ import annotations

import abc

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_STEP = np.float32(2.0**-32)
_FINE = 2.0**-53
TWO_PI = np.float32(2 * np.pi)


class Generators(abc.ABC):
    """States of `count` generators; each must be seeded before its first use. A mask says which of them draw. `seeded`:
    mask of those that have been."""

    def __init__(self, count: int):
        self.seeded = np.zeros(count, bool)
        self._kept = {np.dtype(kind): np.full(count, np.nan, kind) for kind in ("float32", "float64")}

    def seed(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Set the generators of a mask."""
        self._start(which, *(value.astype(np.int64).view(np.uint64)[which] for value in (seed, sequence, offset)))
        self.seeded |= which
        for kept in self._kept.values():
            kept[which] = np.nan

    @abc.abstractmethod
    def _start(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Set the generators of a mask by values for each of them, uint64."""

    @abc.abstractmethod
    def words(self, which: np.ndarray) -> np.ndarray:
        """The next word of each generator of a mask, uint32; anything for the others."""

    def uniform(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Numbers in (0, 1]."""
        if dtype == np.float64:
            return self._fine(which)
        return self.words(which).astype(np.float32) * _STEP + _STEP / np.float32(2)

    def _fine(self, which: np.ndarray) -> np.ndarray:
        low, high = (self.words(which).astype(np.uint64) for _ in range(2))
        return (low ^ (high << np.uint64(21))).astype(np.float64) * _FINE + _FINE / 2

    def _angle(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Numbers in (0, 2 pi]."""
        if dtype == np.float64:
            return self._fine(which) * (2 * np.pi)
        return self.words(which).astype(np.float32) * (_STEP * TWO_PI) + _STEP * TWO_PI / np.float32(2)

    def pair(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Two numbers of the normal distribution for each generator, by Box and Muller; shape (2, count)."""
        radius = self._fine(which) if dtype == np.float64 else self.uniform(which, dtype)
        angle = self._angle(which, dtype)
        length = np.sqrt(dtype.type(-2) * np.log(np.where(which, radius, dtype.type(1))))
        return np.stack([length * np.sin(angle), length * np.cos(angle)])

    def normal(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Numbers of the normal distribution. The second one of a pair is kept for the next call."""
        kept = self._kept[dtype]
        fresh = which & np.isnan(kept)
        first, second = self.pair(fresh, dtype) if fresh.any() else (kept, kept)
        found = np.where(fresh, first, kept)
        kept[which] = np.where(fresh, second, dtype.type(np.nan))[which]
        return found

    def draw(self, kind: str, dtype: np.dtype, which: np.ndarray) -> np.ndarray:
        """The next number of each generator: a word, or one of a distribution."""
        return self.words(which) if kind == "word" else getattr(self, kind)(which, dtype)

    def vector(self, kind: str, dtype: np.dtype, lanes: int, which: np.ndarray) -> np.ndarray:
        """Numbers that one call of a function for vectors gives, shape (lanes, count)."""
        if kind == "normal" and self.has_vectors(kind, dtype, lanes):
            return np.concatenate([self.pair(which, dtype) for _ in range(lanes // 2)])
        return np.stack([self.draw(kind, dtype, which) for _ in range(lanes)])

    @classmethod
    def has_vectors(cls, kind: str, dtype: np.dtype, lanes: int) -> bool:
        """Whether TileLang calls a function that gives other numbers than as many calls for one."""
        return kind == "normal" and lanes == 2


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words for each counter of four words, shape (4, n), and key of two, shape (2, n); uint32."""
    c = counter.astype(np.uint64)
    k = key.astype(np.uint64)
    for number in range(_ROUNDS):
        if number:
            k = (k + np.array(_WEYL, np.uint64)[:, None]) & _LOW
        first, second = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = np.stack([
            (second >> _SHIFT) ^ c[1] ^ k[0], second & _LOW, (first >> _SHIFT) ^ c[3] ^ k[1], first & _LOW,
        ])  # fmt: skip
    return c.astype(np.uint32)


class Philox(Generators):
    """Philox4x32-10: words are a function of their number."""

    def __init__(self, count: int):
        super().__init__(count)
        self.position = np.zeros(count, np.uint64)
        self.sequence = np.zeros(count, np.uint64)
        self.key = np.zeros((2, count), np.uint32)

    def _start(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        self.key[0, which], self.key[1, which] = seed & _LOW, seed >> _SHIFT
        self.sequence[which], self.position[which] = sequence, offset

    def words(self, which: np.ndarray) -> np.ndarray:
        """The next word of each generator of a mask."""
        block = self.position >> np.uint64(2)
        counter = np.stack([block & _LOW, block >> _SHIFT, self.sequence & _LOW, self.sequence >> _SHIFT])
        found = philox(counter, self.key)
        picked = np.take_along_axis(found, (self.position & np.uint64(3)).astype(np.int64)[None], axis=0)[0]
        self.position[which] += np.uint64(1)
        return picked

    def uniform(self, which: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Numbers in (0, 1]; those of 64 bits are of one word, except in vectors."""
        if dtype == np.float64:
            return self.words(which) * 2.0**-32 + 2.0**-32
        return super().uniform(which, dtype)

    def vector(self, kind: str, dtype: np.dtype, lanes: int, which: np.ndarray) -> np.ndarray:
        """Numbers of one call, shape (lanes, count)."""
        if kind == "uniform" and self.has_vectors(kind, dtype, lanes):
            return np.stack([self._fine(which) for _ in range(lanes)])
        return super().vector(kind, dtype, lanes, which)

    @classmethod
    def has_vectors(cls, kind: str, dtype: np.dtype, lanes: int) -> bool:
        if dtype == np.float64:
            return kind != "word" and lanes == 2
        return kind == "normal" and lanes in (2, 4)
