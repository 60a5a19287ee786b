# SPDX-License-Identifier: MIT
"""The Philox4x32-10 generator as cuRAND's device functions use it, for many states at once.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the cuRAND guide, section "Device API Overview",
defines the state by seed, sequence and offset.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_STEP = np.float32(2.3283064e-10)
"""2^-32, as cuRAND rounds it."""


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


class Philox:
    """States of `count` generators; each must be seeded before its first use."""

    def __init__(self, count: int):
        self.position = np.zeros(count, np.uint64)
        self.sequence = np.zeros(count, np.uint64)
        self.key = np.zeros((2, count), np.uint32)
        self.normals = np.full(count, np.nan, np.float32)

    def seed(self, which: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Set the generators of a mask."""
        seed = seed.astype(np.int64).view(np.uint64)
        self.key[0, which], self.key[1, which] = (seed & _LOW)[which], (seed >> _SHIFT)[which]
        self.sequence[which] = sequence.astype(np.int64).view(np.uint64)[which]
        self.position[which] = offset.astype(np.int64).view(np.uint64)[which]
        self.normals[which] = np.nan

    def words(self, which: np.ndarray) -> np.ndarray:
        """The next word of each generator of a mask, 0 for the others."""
        block = self.position >> np.uint64(2)
        counter = np.stack([block & _LOW, block >> _SHIFT, self.sequence & _LOW, self.sequence >> _SHIFT])
        found = philox(counter, self.key)
        picked = np.take_along_axis(found, (self.position & np.uint64(3)).astype(np.int64)[None], axis=0)[0]
        self.position[which] += np.uint64(1)
        return np.where(which, picked, np.uint32(0))

    def uniform(self, which: np.ndarray) -> np.ndarray:
        """Numbers in (0, 1], float32."""
        return self.words(which).astype(np.float32) * _STEP + _STEP / np.float32(2)

    def normal(self, which: np.ndarray) -> np.ndarray:
        """Numbers of the normal distribution, float32: pairs by Box and Muller, the second of which is kept for the
        next call.
        """
        fresh = which & np.isnan(self.normals)
        radius = np.sqrt(np.float32(-2) * np.log(np.where(fresh, self.uniform(fresh), np.float32(1))))
        turn = _STEP * np.float32(2 * np.pi)
        angle = self.words(fresh).astype(np.float32) * turn + turn / np.float32(2)
        found = np.where(fresh, radius * np.sin(angle), self.normals)
        self.normals[which] = np.where(fresh, radius * np.cos(angle), np.float32(np.nan))[which]
        return np.where(which, found, np.float32(0))
