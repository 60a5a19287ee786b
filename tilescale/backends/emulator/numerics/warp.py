# SPDX-License-Identifier: MIT
"""Warp operations on a full lane axis: axis 0 of every array is the threads of a block, in order of their index.

Warps are 32 threads unless `warp` says otherwise. Shuffles follow PTX's `shfl.sync`, votes `vote.sync`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilescale.backends.emulator.numerics.dtypes import as_compute, convert, is_float
from tilescale.backends.emulator.numerics.reduce import combine_ufunc, identity
from tilescale.errors import UnsupportedError

WARP = 32
FULL_MASK = 0xFFFFFFFF


def shfl(values: np.ndarray, lane: Any, width: int = WARP, kind: str = "idx", *, warp: int = WARP) -> np.ndarray:
    """Each thread's value from another thread of its segment of `width` lanes.

    `lane` (one number or one per thread) is the source lane for "idx", the distance for "up" and "down", the mask for
    "xor". A source outside the segment gives the thread's own value ("xor" reaches earlier segments of the warp, as
    the hardware does); so does one beyond the last thread.
    """
    thread = np.arange(values.shape[0])
    here = thread % warp
    base = here - here % width
    last = base + width - 1
    lane = np.asarray(lane).astype(np.int64)
    if kind == "idx":
        source = base + lane % width
    elif kind == "up":
        source = np.where(here - lane >= base, here - lane, here)
    elif kind in ("down", "xor"):
        target = here + lane if kind == "down" else here ^ lane
        source = np.where((target <= last) & (target >= 0), target, here)
    else:
        raise UnsupportedError(f"unknown shuffle {kind!r}", hint="one of idx, up, down, xor")
    source = thread - here + source
    return values[np.where(source < values.shape[0], source, thread)]


def vote(predicate: np.ndarray, mask: Any = FULL_MASK, kind: str = "any", *, warp: int = WARP) -> np.ndarray:
    """Per thread "any", "all" (int32) or "ballot" (uint64, bit i for lane i) of its warp's lanes that are in `mask`.

    Pass the threads that execute the operation as part of `mask` when some have left; activemask is
    `vote(active, kind="ballot")`.
    """
    taking_part = _in_mask(predicate.shape[0], mask, warp)
    true = _by_warp(predicate != 0, warp) & taking_part
    if kind == "any":
        result = true.any(axis=1).astype(np.int32)
    elif kind == "all":
        result = (true == taking_part).all(axis=1).astype(np.int32)
    elif kind == "ballot":
        result = _bits(true)
    else:
        raise UnsupportedError(f"unknown vote {kind!r}", hint="one of any, all, ballot")
    return _to_threads(result, predicate.shape[0], warp)


def match_any(values: np.ndarray, mask: Any = FULL_MASK, *, warp: int = WARP) -> np.ndarray:
    """Per thread the uint32 set of lanes in `mask` of its warp that hold its value, compared bit by bit."""
    rows = _by_warp(_patterns(values), warp)
    same = (rows[:, :, None] == rows[:, None, :]) & _in_mask(values.shape[0], mask, warp)[:, None, :]
    return _bits(same).astype(np.uint32).reshape(-1)[: values.shape[0]]


def match_all(values: np.ndarray, mask: Any = FULL_MASK, *, warp: int = WARP) -> np.ndarray:
    """Per thread uint32: the lanes of `mask` if all of them hold one value, else 0."""
    sets = match_any(values, mask, warp=warp)
    everyone = _to_threads(_bits(_in_mask(values.shape[0], mask, warp)), values.shape[0], warp)
    first = shfl(sets, _first_lane(everyone), kind="idx", width=warp, warp=warp)
    return np.where(first == everyone, everyone, 0).astype(np.uint32)


def warp_reduce(values: np.ndarray, kind: str, *, warp: int = WARP) -> np.ndarray:
    """Per thread the sum, max, min, bitand, bitor or bitxor of its warp, in the type of `values`.

    Narrow floats accumulate in float32; the hardware rounds every step to the type.
    """
    wide = as_compute(values) if is_float(values.dtype) else values
    neutral = identity(kind, wide.dtype)
    ufunc = combine_ufunc(kind)
    rows = _by_warp(wide, warp, neutral)
    result = ufunc.reduce(rows, axis=1, dtype=wide.dtype, initial=neutral)
    return _to_threads(convert(result, values.dtype), values.shape[0], warp)


def _by_warp(x: np.ndarray, warp: int, fill: Any = 0) -> np.ndarray:
    """(threads,) as (warps, lanes); missing lanes of the last warp hold `fill`."""
    missing = -x.shape[0] % warp
    padded = np.concatenate((x, np.full(missing, fill, x.dtype))) if missing else x
    return padded.reshape(-1, warp)


def _to_threads(per_warp: np.ndarray, threads: int, warp: int) -> np.ndarray:
    return np.repeat(per_warp, warp)[:threads]


def _in_mask(threads: int, mask: Any, warp: int) -> np.ndarray:
    """(warps, lanes) bool: lanes that exist and are in the mask of their own thread."""
    lane = np.arange(threads) % warp
    chosen = (np.broadcast_to(np.asarray(mask).astype(np.uint64), threads) >> lane.astype(np.uint64)) & np.uint64(1)
    return _by_warp(chosen != 0, warp)


def _bits(rows: np.ndarray) -> np.ndarray:
    """The last axis of bools as one uint64, lane 0 lowest."""
    weights = np.uint64(1) << np.arange(rows.shape[-1], dtype=np.uint64)
    return np.where(rows, weights, np.uint64(0)).sum(axis=-1, dtype=np.uint64)


def _first_lane(sets: np.ndarray) -> np.ndarray:
    lowest = sets & (~sets + np.uint64(1))
    return np.maximum(np.frexp(lowest.astype(np.float64))[1] - 1, 0)


def _patterns(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}") if values.dtype != np.bool_ else values.view(np.uint8)
