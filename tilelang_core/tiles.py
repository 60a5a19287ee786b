# SPDX-License-Identifier: MIT
"""Typed views of TileLang's operations on tiles: the one place that knows the positions of arguments.

`Gemm.of(call).transpose_a` reads a call; `with_tiles` and others make the same operation on other arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir

_STACKED = "stacked"
"""Annotation of a GEMM of many pairs of matrices."""

_ACCESS = {1: "r", 2: "w", 3: "rw"}


def is_region(node: Any) -> bool:
    """Whether a node is a tile argument."""
    return ir.op_name(node) == tl.REGION


def regions_of(call: ir.Call) -> list[ir.Call]:
    """The tile arguments of an operation, in order."""
    return [argument for argument in call.args if is_region(argument)]


def access_of(region: ir.Call) -> str:
    """Access of a region: "r", "w" or "rw"."""
    return _ACCESS[ir.integer(region.args[1])]


def is_written(region: ir.Call) -> bool:
    """Whether a region is written, among other things or only."""
    return "w" in access_of(region)


def first_element(region: ir.Call) -> ir.BufferLoad:
    """The load that says where a region begins."""
    return region.args[0]


def with_leading_one(region: ir.Call) -> ir.Call | None:
    """A region that names one index more than it has extents as one of a single such index; None for others."""
    load, access, *extents = region.args
    if len(extents) == len(load.indices):
        return None
    return tir.recall(region, [load, access, ir.IntImm("int32", 1), *extents])


def read_and_written(call: ir.Call) -> tuple[Any | None, ir.Call | None]:
    """The tiles, or elements, that an operation with these first two arguments reads and writes."""
    source, *others = call.args
    is_read = is_region(source) or isinstance(source, ir.BufferLoad)
    return source if is_read else None, others[0] if others and is_region(others[0]) else None


def data_of(region: ir.Call) -> ir.Var:
    """The data variable of a region's buffer."""
    return ir.region_parts(region)[0].data


@dataclass(frozen=True)
class TileCopy:
    """`T.copy` inside a device, `T.transpose`, and the atomic operations from one region to another."""

    call: ir.Call
    source: Any
    target: ir.Call

    @property
    def is_of_tiles(self) -> bool:
        """Whether the source is a tile, no number."""
        return is_region(self.source) or isinstance(self.source, ir.BufferLoad)

    @classmethod
    def of(cls, call: ir.Call) -> TileCopy:
        """A call of such an operation; the source of an atomic one may be a number."""
        return cls(call, call.args[0], call.args[1])

    def between(self, source: Any, target: ir.Call) -> ir.Stmt:
        """The same copy between other regions."""
        return tir.evaluate(tir.recall(self.call, [source, target, *self.call.args[2:]]))


@dataclass(frozen=True)
class Fill:
    """`T.fill` or `T.clear`."""

    call: ir.Call
    target: ir.Call
    value: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> Fill:
        return cls(call, call.args[0], call.args[1])

    def on(self, target: ir.Call) -> ir.Stmt:
        """The same operation on another region."""
        return tir.evaluate(tir.recall(self.call, [target, self.value]))


@dataclass(frozen=True)
class Reduce:
    """`T.reduce_sum` and the like.

    Attributes:
        kind: "sum", "max", "absmax", ...
        dim: the dimension that is reduced.
        clear: whether the target's previous contents are ignored.
    """

    call: ir.Call
    source: ir.Call
    target: ir.Call
    kind: str
    dim: int
    clear: bool

    @classmethod
    def of(cls, call: ir.Call) -> Reduce:
        source, target, kind, dim, clear = call.args[:5]
        return cls(call, source, target, str(kind.value), ir.integer(dim), bool(ir.constant(clear)))

    def between(self, source: ir.Call, target: ir.Call) -> ir.Stmt:
        """The same reduction between other regions."""
        return tir.evaluate(tir.recall(self.call, [source, target, *self.call.args[2:]]))

    def stacked(self, source: ir.Call, target: ir.Call) -> ir.Stmt:
        """The same reduction of many tiles, between regions with a leading dimension more."""
        dim = ir.IntImm("int32", self.dim + (self.dim >= 0))
        kind, _, *others = self.call.args[2:]
        return tir.evaluate(tir.recall(self.call, [source, target, kind, dim, *others]))

    def cleared(self, source: ir.Call, target: ir.Call) -> ir.Stmt:
        """The same reduction between other regions, ignoring the target's contents."""
        return tir.evaluate(tir.recall(self.call, [source, target, *self.call.args[2:4], ir.IntImm("bool", 1)]))


@dataclass(frozen=True)
class Gemm:
    """`T.gemm`: C += A B, with A and B optionally transposed.

    Attributes:
        sizes: rows and columns of C, and the inner dimension.
        clear: whether C's contents do not count.
    """

    call: ir.Call
    a: ir.Call
    b: ir.Call
    c: ir.Call
    transpose_a: bool
    transpose_b: bool
    sizes: tuple[Any, Any, Any]
    clear: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> Gemm:
        a, b, c, transpose_a, transpose_b, m, n, k, _, clear = call.args[:10]
        return cls(call, a, b, c, bool(ir.constant(transpose_a)), bool(ir.constant(transpose_b)), (m, n, k), clear)

    @property
    def policy(self) -> ir.PrimExpr:
        """Distribution of C over its warps."""
        return self.call.args[8]

    def shared_out(self, policy: int) -> ir.Call:
        """The same GEMM with another distribution of C."""
        args = list(self.call.args)
        args[8] = ir.IntImm("int32", policy)
        return ir.Call(self.call.dtype, self.call.op, args, dict(self.call.annotations))

    @property
    def done(self) -> ir.PrimExpr | None:
        """The barrier in shared memory that learns of its end; None if there is none."""
        place = self.call.args[10]
        return place if ir.constant(place) is None else None

    @property
    def is_plain(self) -> bool:
        """Whether it has no options beyond this record."""
        return all(ir.constant(n) == 0 for n in self.call.args[10:])

    @property
    def operands(self) -> tuple[ir.Call, ir.Call, ir.Call]:
        """A, B and C."""
        return self.a, self.b, self.c

    @property
    def notes(self) -> dict[str, Any]:
        """Its annotations, numbers as Python has them."""
        return {str(key): ir.constant(value) for key, value in dict(self.call.annotations or {}).items()}

    def on(self, operands: Sequence[ir.Call], sizes: Sequence[Any], clear: Any = None) -> ir.Stmt:
        """The same GEMM on other operands, of other sizes."""
        cleared = self.clear if clear is None else clear
        sizes = [ir.int_node(n) for n in sizes]
        args = [*operands, *self.call.args[3:5], *sizes, self.call.args[8], cleared, *self.call.args[10:]]
        return tir.evaluate(tir.recall(self.call, args))

    @property
    def is_stacked(self) -> bool:
        """Whether it multiplies many pairs of matrices, along a leading dimension of its operands."""
        return bool(ir.attribute(self.call, _STACKED, 0))

    def stacked(self, operands: Sequence[ir.Call]) -> ir.Stmt:
        """The same GEMM of many pairs of matrices, of operands with a leading dimension more."""
        notes = {**dict(self.call.annotations or {}), _STACKED: ir.IntImm("int32", 1)}
        return tir.evaluate(ir.Call(self.call.dtype, self.call.op, [*operands, *self.call.args[3:]], notes))

    def started(self) -> ir.Stmt:
        """The same GEMM, started without a wait."""
        notes = {**dict(self.call.annotations or {}), "wg_wait": ir.IntImm("int32", -1)}
        return tir.evaluate(ir.Call(self.call.dtype, self.call.op, list(self.call.args), notes))

    def by_two_blocks(self, a: ir.Call, b: ir.Call, result: ir.Call, clear: Any, done: Any) -> ir.Stmt:
        """The same GEMM by two thread blocks at once, into tensor memory; `done` is the barrier that signals its
        end."""
        rows, columns = ir.region_parts(result)[2]
        left = [*self.call.args[3:5], rows, columns, self.sizes[2], self.call.args[8], clear, done]
        arguments = [a, b, result, *left, *self.call.args[11:]]
        return tir.evaluate(tir.call(tl.TCGEN05_GEMM, *arguments, annotations={"is_tcgen05": 1, "use_2cta": 1}))


@dataclass(frozen=True)
class ScaledGemm(Gemm):
    """`T.gemm_blockscaled`: as `Gemm`, of operands whose blocks along the inner dimension have scales.

    Attributes:
        scales: those of A and of B, each the pointer or region that the operation got.
        first: the index of the first column among those that have scales.
    """

    scales: tuple[Any, Any]
    first: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> ScaledGemm:
        plain = Gemm.of(call)
        fields = call, *plain.operands, plain.transpose_a, plain.transpose_b, plain.sizes, plain.clear
        return cls(*fields, (call.args[13], call.args[14]), call.args[15])


@dataclass(frozen=True)
class SparseGemm:
    """`T.gemm_sp`: C += A B, where A holds two of four elements, and `metadata` which ones."""

    a: ir.Call
    metadata: ir.Call
    b: ir.Call
    c: ir.Call
    transpose_a: bool
    transpose_metadata: bool
    transpose_b: bool
    clear: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> SparseGemm:
        given = [*call.args[:4], *(bool(ir.constant(flag)) for flag in call.args[4:7]), call.args[11]]
        return cls(*given)


@dataclass(frozen=True)
class Scan:
    """`T.cumsum` and `T.cummax`, along a dimension, from its end if `reverse`."""

    source: ir.Call
    target: ir.Call
    dim: int
    reverse: bool

    @classmethod
    def of(cls, call: ir.Call) -> Scan:
        source, target, dim, reverse = call.args[:4]
        return cls(source, target, ir.integer(dim), bool(ir.constant(reverse)))


@dataclass(frozen=True)
class Im2col:
    """`T.im2col`: patches of an image as rows.

    `settings`: the steps of patches and of columns, kernel, stride, dilation, padding.
    """

    image: ir.Call
    patches: ir.Call
    settings: tuple[ir.PrimExpr, ...]

    @classmethod
    def of(cls, call: ir.Call) -> Im2col:
        return cls(call.args[0], call.args[1], tuple(call.args[2:8]))


@dataclass(frozen=True)
class Reducer:
    """The operations on a reducer: its begin, an update, its end.

    Attributes:
        reducer: its region; of an update the element.
        other: the initial value, the addend, or the target; None for a begin with the neutral element.
    """

    reducer: Any
    other: Any | None

    @classmethod
    def of(cls, call: ir.Call) -> Reducer:
        return cls(call.args[0], call.args[1] if len(call.args) > 1 else None)
