# SPDX-License-Identifier: MIT
"""Copies between shared and device memory that bulk instructions cannot make: by threads.

TileLang 0.1.15 stores shared memory in bulk, unless it proves that the size is not a multiple of 16 bytes. It does not
look at addresses. An instruction for contiguous bytes (PTX ISA, cp.async.bulk) takes addresses and sizes in
multiples of 16 bytes; one with a descriptor (cp.async.bulk.tensor) any place in device memory, but multiples of 128
bytes in shared memory and constant extents. Others end a kernel with an error at run time, or have no text.

Before: `T.copy(tile[0:4], X[1:5])`. After: the same with `disable_tma`. Before: `T.copy(tile[0:n], X[0:n])`. After: a
loop over the elements of the smaller side, without those from n on. TileLang's own loop has n iterations, and where n
is a bit operation it fails to distribute these over threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer

from tilelang_core import tl
from tilelang_core.bounds import divisor_by
from tilelang_core.copy_nests import nest
from tilelang_core.ir import (
    attribute,
    bits,
    constant,
    constants,
    contains,
    op_name,
    proves,
    region_parts,
    scope_kind,
    substitute,
    variables,
    walk,
)
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, rewritten

_BY_THREADS, _ASKED_FOR = "disable_tma", "prefer_instruction"
"""Annotations of a copy that is not made in bulk, and of one with a chosen instruction."""

_BYTES, _TENSOR = 16, 128
"""Multiples of bytes that instructions for contiguous bytes take, and those with a descriptor in shared memory."""


def with_copies_by_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such copies one whose threads make them."""
    if not contains(func.body, _may_be_bulk):
        return func
    analyzer, names = analyzer_of(loop_ranges(func.body)), _names(func.body)

    def leave(node: Any) -> Any:
        copy = node.value if isinstance(node, tirx.Evaluate) else None
        if copy is None or not _may_be_bulk(copy) or _is_executable(copy, analyzer, names):
            return None
        return at(nest(*copy.args[:2]) if _is_unknown(copy) else tirx.Evaluate(_by_threads(copy)), node)

    return rewritten(func, leave)


def with_stores_by_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it stores parts of tiles in shared memory one whose threads store them."""

    def is_part(region: Any) -> bool:
        buffer, _, extents = region_parts(region)
        return scope_kind(buffer) == "shared" and not all(
            constant(extent) == 1 or proves(extent == size, {})
            for extent, size in zip(extents, buffer.shape, strict=True)
        )

    return rewritten(func, lambda node: _by_threads(node) if _may_be_bulk(node) and is_part(node.args[0]) else None)


def _by_threads(copy: tirx.Call) -> tirx.Call:
    notes = {**dict(copy.annotations or {}), _BY_THREADS: tirx.IntImm("bool", 1)}
    return tirx.Call(copy.dtype, copy.op, list(copy.args), notes)


@dataclass(frozen=True)
class _Side:
    """A region that a copy reads or writes, with the strides of its buffer."""

    buffer: tirx.Buffer
    begins: Sequence[tirx.PrimExpr]
    extents: Sequence[tirx.PrimExpr]

    @property
    def strides(self) -> list[Any]:
        if self.buffer.strides:
            return list(self.buffer.strides)
        found: list[Any] = [tirx.IntImm("int64", 1)]
        for size in list(self.buffer.shape)[:0:-1]:
            found.insert(0, found[0] * size)
        return found

    @property
    def size(self) -> Any:
        """Number of elements."""
        total: Any = tirx.IntImm("int64", 1)
        for extent in self.extents:
            total = total * extent
        return total

    def begins_at(self, multiple: int, analyzer: Analyzer) -> bool:
        """Whether its address is a multiple of `multiple` bytes, if that of its buffer is."""
        place: Any = tirx.IntImm("int64", 0)
        for begin, stride in zip(self.begins, self.strides, strict=True):
            place = place + tirx.Cast("int64", begin) * stride
        return _divides(multiple, place, str(self.buffer.dtype), analyzer)

    def is_inside(self, analyzer: Analyzer) -> bool:
        """Whether it is proven to lie inside its buffer."""
        parts = zip(self.begins, self.extents, self.buffer.shape, strict=True)
        return all(analyzer.can_prove(begin + extent <= size) for begin, extent, size in parts)

    def is_contiguous(self, analyzer: Analyzer) -> bool:
        """Whether all but the first of its extents other than 1 are those of its buffer."""
        axes = [axis for axis, extent in enumerate(self.extents) if constant(analyzer.simplify(extent)) != 1]
        if not axes:
            return True
        parts = zip(self.buffer.shape, self.extents, strict=True)
        return all(analyzer.can_prove_equal(size, extent) for size, extent in [*parts][axes[0] + 1 :])


def _is_executable(copy: tirx.Call, analyzer: Analyzer, names: Mapping[tirx.Var, Any]) -> bool:
    """Whether the bulk instruction that TileLang chooses for a copy can make it."""
    shared, device = sorted(_sides(copy, names), key=lambda side: scope_kind(side.buffer) != "shared")
    if _is_unknown(copy):
        size = _divides(_BYTES, shared.size, str(shared.buffer.dtype), analyzer)
        both = device, shared
        return size and all(side.is_contiguous(analyzer) and side.begins_at(_BYTES, analyzer) for side in both)
    # For bytes only where they are contiguous and both sides are inside their buffers, else with a descriptor.
    is_of_bytes = device.is_contiguous(analyzer) and all(side.is_inside(analyzer) for side in (shared, device))
    return shared.begins_at(_TENSOR, analyzer) and (not is_of_bytes or device.begins_at(_BYTES, analyzer))


def _is_unknown(copy: tirx.Call) -> bool:
    """Whether a copy has extents that are known at run time only."""
    return any(constants(region_parts(region)[2]) is None for region in copy.args[:2])


def _divides(multiple: int, elements: Any, dtype: str, analyzer: Analyzer) -> bool:
    """Whether the size of a number of elements is a multiple of `multiple` bytes."""
    return divisor_by(analyzer, analyzer.simplify(elements * bits(dtype))) % (8 * multiple) == 0


def _sides(copy: tirx.Call, names: Mapping[tirx.Var, Any]) -> list[_Side]:
    sides = []
    for region in copy.args[:2]:
        buffer, begins, extents = region_parts(region)
        sides.append(_Side(buffer, *([_spelled_out(n, names) for n in part] for part in (begins, extents))))
    return sides


def _may_be_bulk(node: Any) -> bool:
    if op_name(node) != tl.COPY or attribute(node, _BY_THREADS) or attribute(node, _ASKED_FOR):
        return False
    return {scope_kind(region_parts(region)[0]) for region in node.args[:2]} == {"shared", "global"}


def _names(body: tirx.Stmt) -> dict[tirx.Var, Any]:
    """Names of values, which TileLang puts in their places."""
    names: dict[tirx.Var, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Bind):
            names[node.var] = _spelled_out(node.value, names)

    walk(body, visit)
    return names


def _spelled_out(value: Any, names: Mapping[tirx.Var, Any]) -> Any:
    return substitute(value, dict(names)) if variables(value) & names.keys() else value
