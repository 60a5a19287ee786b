# SPDX-License-Identifier: MIT
"""Atomic updates of array elements by many threads at once, several of which may name the same element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.backends.emulator.numerics import dtypes
from tilescale.errors import ShapeError, UnsupportedError

_UFUNCS = {
    "add": np.add,
    "max": np.fmax,
    "min": np.fmin,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}
_F32 = np.dtype(np.float32)


def atomic_update(
    array: np.ndarray,
    index: tuple[Any, ...],
    values: Any,
    op: str,
    mask: Any = None,
    return_prev: bool = False,
) -> Any:
    """Update array[index] with `values`, one step per element in the order of the (broadcast) index arrays.

    op: add, max, min, or, and, xor, exch, store, load, cas. `values` has any type and is converted to the array's; for
    cas it is the pair (expected, new), for load it is ignored. An empty index means all of `array`, element by element.
    Every step rounds or wraps in the array's type. Elements with a false `mask` take no part. Raises ShapeError:
    `values` do not broadcast to the index.

    Returns:
        With `return_prev` (and for load): the value each element saw, in the index's shape, 0 where masked off.
    """
    if mask is None and (not index or len(index) == array.ndim and all(np.ndim(i) == 0 for i in index)):
        previous = _update_once(array, index, values, op)
        return previous if return_prev or op == "load" else None
    places, shape = _flat_places(array, index)
    operands = tuple(_spread(v, shape, op).reshape(-1) for v in _operands(values, op, array.dtype))
    active = None if mask is None else np.flatnonzero(np.broadcast_to(mask, shape))
    if active is not None:
        places, operands = places[active], tuple(v[active] for v in operands)
    previous = _update_flat(array, places, operands, op, return_prev)
    if previous is None or active is None:
        return None if previous is None else previous.reshape(shape)
    full = np.zeros(shape, array.dtype)
    full.reshape(-1)[active] = previous
    return full


def _update_once(array: np.ndarray, index: tuple[Any, ...], values: Any, op: str) -> Any:
    """Update one element, or each one of `array` where the index is empty; returns the old values."""
    place = index or ...
    previous = array[place] if index else array.copy()
    if op != "load":
        operands = _operands(values, op, array.dtype)
        array[place] = _step(op, previous, tuple(_spread(v, np.shape(previous), op) for v in operands))
    return previous


def _operands(values: Any, op: str, dtype: np.dtype) -> tuple[Any, ...]:
    if op == "load":
        return ()
    return tuple(dtypes.convert(v, dtype) for v in (values if op == "cas" else (values,)))


def _flat_places(array: np.ndarray, index: tuple[Any, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    if not index:
        return np.arange(array.size), array.shape
    if len(index) != array.ndim:
        raise ShapeError(f"an atomic on {array.ndim} dimensions with {len(index)} indices")
    shape = np.broadcast_shapes(*(np.shape(i) for i in index))
    flat = np.ravel_multi_index(tuple(np.broadcast_to(i, shape) for i in index), array.shape)
    return np.asarray(flat).reshape(-1), shape


def _spread(value: Any, shape: tuple[int, ...], op: str) -> Any:
    try:
        return value if np.shape(value) == shape else np.broadcast_to(value, shape)
    except ValueError as error:
        raise ShapeError(f"atomic {op}: values {np.shape(value)} for elements {shape}") from error


def _update_flat(
    array: np.ndarray, places: np.ndarray, operands: tuple[np.ndarray, ...], op: str, return_prev: bool
) -> np.ndarray | None:
    # reshape(-1) of a strided view would copy; unravelled indices reach any array.
    flat = array.reshape(-1) if array.flags.c_contiguous else None
    where: Callable[[np.ndarray], Any]
    where = (lambda p: p) if flat is not None else lambda p: np.unravel_index(p, array.shape)
    target = array if flat is None else flat
    if op == "load":
        return target[where(places)]
    if op in ("store", "exch") and not return_prev:
        target[where(places)] = operands[0]  # the last of equal indices wins
        return None
    ufunc = _UFUNCS.get(op)
    if ufunc is not None and not return_prev and (array.dtype.kind in "iub" or array.dtype.itemsize >= 4):
        ufunc.at(target, where(places), operands[0])
        return None
    previous = np.empty(places.size, array.dtype)
    for round_ in _rounds(places):
        here = where(places[round_])
        seen = target[here]
        previous[round_] = seen
        target[here] = _step(op, seen, tuple(v[round_] for v in operands))
    return previous if return_prev else None


def _rounds(places: np.ndarray) -> list[Any]:
    """Split the elements into rounds of distinct indices, keeping the order among equal ones."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    starts = np.flatnonzero(np.r_[True, sorted_places[1:] != sorted_places[:-1]]) if places.size else places
    if starts.size == places.size:
        return [slice(None)] if places.size else []
    counts = np.diff(np.r_[starts, places.size])
    rank = np.empty(places.size, np.intp)
    rank[order] = np.arange(places.size) - np.repeat(starts, counts)
    by_rank = np.argsort(rank, kind="stable")
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])


def _step(op: str, seen: Any, operands: tuple[Any, ...]) -> Any:
    if op in ("store", "exch"):
        return operands[0]
    if op == "cas":
        expected, new = operands
        return np.where(seen == expected, new, seen)
    if op not in _UFUNCS:
        raise UnsupportedError(f"unknown atomic {op!r}", hint="one of " + ", ".join([*_UFUNCS, "exch", "store", "cas"]))
    dtype = seen.dtype
    if dtypes.is_float(dtype) and dtype.itemsize < 4:
        return dtypes.convert(_UFUNCS[op](*(dtypes.convert(x, _F32) for x in (seen, operands[0]))), dtype)
    return _UFUNCS[op](seen, operands[0])
