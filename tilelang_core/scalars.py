# SPDX-License-Identifier: MIT
"""Typed views of TileLang's and TVM's operations on elements, threads and barriers: positions of their arguments.

As `tiles.py` for operations on tiles: `AsyncCopy.of(call).predicate` reads a call. None stands for an argument that a
call may leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl


def _optional(args: Any, position: int) -> Any | None:
    return args[position] if len(args) > position else None


def operand_of(call: ir.Call) -> ir.PrimExpr:
    """The operand of an operation that has one: a reduction over a warp, a vote of a program, a reinterpretation, an
    assumption, a number of a host's memory."""
    return call.args[0]


@dataclass(frozen=True)
class IfThenElse:
    """`T.if_then_else`."""

    condition: ir.PrimExpr
    then: ir.PrimExpr
    otherwise: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> IfThenElse:
        return cls(*call.args)


# -- threads -----------------------------------------------------------------------------------------------------------


def thread_axis(index: ir.Call) -> int:
    """The axis of a program's threads that an index of them (`tl.THREAD_INDEX`) is along."""
    return int(index.args[0])


def elected_of(call: ir.Call) -> int:
    """Number of threads of which `tl.ELECT` elects one; 0 for a whole program."""
    return ir.integer(call.args[0])


@dataclass(frozen=True)
class WarpIndex:
    """The number of a lane, a warp or a warpgroup. `lanes`: of a warp; `warps`, of a warpgroup."""

    lanes: int | None
    warps: int | None

    @classmethod
    def of(cls, call: ir.Call) -> WarpIndex:
        return cls(ir.constant(_optional(call.args, 0)), ir.constant(_optional(call.args, 1)))


@dataclass(frozen=True)
class Shuffle:
    """An exchange within a warp. `lane`: whose value a thread gets, by the kind of exchange; within groups of `width`
    lanes."""

    value: ir.PrimExpr
    lane: ir.PrimExpr
    width: int | None

    @classmethod
    def of(cls, call: ir.Call) -> Shuffle:
        """A call of one of these operations; its mask is not looked at."""
        return cls(call.args[1], call.args[2], ir.constant(_optional(call.args, 3)))


def brought_to(call: ir.Call) -> ir.PrimExpr:
    """A thread's operand of a vote or a comparison of its warp, which may name a mask before it."""
    return call.args[0 if ir.op_name(call) == tl.BALLOT else 1]


@dataclass(frozen=True)
class ThreadReduction:
    """`T.tvm_thread_allreduce`.

    `takes_part`: which threads bring their `values`; `results` are pointers, `over` indices of threads.
    """

    values: tuple[ir.PrimExpr, ...]
    takes_part: ir.PrimExpr
    results: tuple[Any, ...]
    over: tuple[ir.PrimExpr, ...]

    @classmethod
    def of(cls, call: ir.Call) -> ThreadReduction:
        count, args = ir.integer(call.args[0]), tuple(call.args[1:])
        values, (takes_part, *others) = args[:count], args[count:]
        return cls(values, takes_part, tuple(others[:count]), tuple(others[count:]))


@dataclass(frozen=True)
class Quantifier:
    """`T.any_of` and `T.all_of`: over `count` elements from the one that a pointer points to."""

    first: Any
    count: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> Quantifier:
        return cls(call.args[0], call.args[1])


# -- barriers ----------------------------------------------------------------------------------------------------------


def _barrier(node: Any) -> ir.BufferLoad | OffsetPointer:
    """The barrier in shared memory that an argument names: an element, or a pointer to it."""
    while isinstance(node, ir.Call):
        if ir.op_name(node) == tl.ACCESS_PTR:
            return OffsetPointer.of(node)
        node = node.args[0]
    return node


@dataclass(frozen=True)
class BarrierWait:
    """A wait until a barrier in shared memory has completed a phase of this parity."""

    barrier: ir.BufferLoad | OffsetPointer
    parity: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> BarrierWait:
        return cls(_barrier(call.args[0]), call.args[1])


@dataclass(frozen=True)
class BarrierArrival:
    """An arrival at a barrier in shared memory, of the program with a rank in its cluster or of this program."""

    barrier: ir.BufferLoad | OffsetPointer
    rank: ir.PrimExpr | None

    @classmethod
    def of(cls, call: ir.Call) -> BarrierArrival:
        is_remote = ir.op_name(call) == tl.ARRIVE_CLUSTER_BARRIER
        return cls(_barrier(call.args[0]), call.args[1] if is_remote else None)


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier with a number, for a number of threads; a program-wide barrier has neither."""

    number: ir.PrimExpr | None
    count: ir.PrimExpr | None

    @classmethod
    def of(cls, call: ir.Call) -> NamedBarrier:
        """A call that synchronizes there, or only arrives."""
        args = call.args[1:] if ir.op_name(call) == tl.STORAGE_SYNC else call.args
        return cls(_optional(args, 0), _optional(args, 1))


def groups_left(call: ir.Call) -> int:
    """Number of groups of copies that may still be in flight after a wait for them."""
    return ir.constant(_optional(call.args, 0)) or 0


# -- memory ------------------------------------------------------------------------------------------------------------


def pointed(pointer: Any) -> Any:
    """The target of a pointer to an element (`tl.DECLARED_PTR`, `tl.ADDRESS_OF`); other nodes unchanged."""
    while ir.op_name(pointer) in (tl.DECLARED_PTR, tl.ADDRESS_OF):
        pointer = pointer.args[0]
    return pointer


@dataclass(frozen=True)
class DeclaredPointer:
    """`T.access_ptr`: how many elements there are, and whether they are read (1), written (2) or both (3)."""

    extent: ir.PrimExpr
    mask: int

    @classmethod
    def of(cls, call: ir.Call) -> DeclaredPointer:
        return cls(call.args[1], ir.integer(call.args[2]))


@dataclass(frozen=True)
class OffsetPointer:
    """`T.tvm_access_ptr`: the element of a type with a position in a buffer, by its data variable."""

    dtype: str
    data: ir.Var
    position: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> OffsetPointer:
        return cls(str(call.args[0].dtype), call.args[1], call.args[2])


@dataclass(frozen=True)
class WordLoad:
    """A load of a word, where a predicate holds."""

    pointer: Any
    predicate: ir.PrimExpr | None

    @classmethod
    def of(cls, call: ir.Call) -> WordLoad:
        return cls(call.args[0], _optional(call.args, 1))


@dataclass(frozen=True)
class WordStore:
    """A store of a word, where a predicate holds."""

    pointer: Any
    value: ir.PrimExpr
    predicate: ir.PrimExpr | None

    @classmethod
    def of(cls, call: ir.Call) -> WordStore:
        return cls(call.args[0], call.args[1], _optional(call.args, 2))


@dataclass(frozen=True)
class AsyncCopy:
    """`cp.async`: a number of elements between two pointers, zeros where a predicate does not hold."""

    target: Any
    source: Any
    count: int
    predicate: ir.PrimExpr | None

    @classmethod
    def of(cls, call: ir.Call) -> AsyncCopy:
        return cls(call.args[0], call.args[1], ir.integer(call.args[2]), _optional(call.args, 3))


@dataclass(frozen=True)
class LoadMatrix:
    """`ldmatrix`: a number of matrices, whose rows threads point to, into each thread's target."""

    transpose: bool
    count: int
    row: Any
    target: Any

    @classmethod
    def of(cls, call: ir.Call) -> LoadMatrix:
        transpose, count, row, target = call.args[:4]
        return cls(bool(ir.constant(transpose)), ir.integer(count), row, target)


@dataclass(frozen=True)
class Atomic:
    """An atomic operation on the element that a pointer points to, or on neighbours from there on.

    Attributes:
        value: of an element, or a pointer to values of neighbours; None for a load.
        order: TileLang's number of the memory order; 0, relaxed, where none is named.
    """

    pointer: Any
    value: Any | None
    order: int

    @classmethod
    def of(cls, call: ir.Call) -> Atomic:
        is_load = ir.op_name(call) == tl.atomic("load")
        order = ir.constant(_optional(call.args, 1 if is_load else 2))
        return cls(call.args[0], None if is_load else call.args[1], order or 0)


@dataclass(frozen=True)
class ScaleCopy:
    """Words of scales from shared into tensor memory, from a column on; the target is a buffer's data variable."""

    source: Any
    target: ir.Var
    column: ir.PrimExpr

    @classmethod
    def of(cls, call: ir.Call) -> ScaleCopy:
        return cls(*call.args[:3])


# -- functions, and declarations of a program --------------------------------------------------------------------------


@dataclass(frozen=True)
class Extern:
    """A function that is called by its name."""

    name: str
    arguments: list[Any]

    @classmethod
    def of(cls, call: ir.Call) -> Extern:
        return cls(str(call.args[0].value), list(call.args[1:]))


@dataclass(frozen=True)
class Assertion:
    """`T.device_assert`: a condition, and the message for its failure."""

    condition: ir.PrimExpr
    message: str

    @classmethod
    def of(cls, call: ir.Call) -> Assertion:
        """A call of it; without a message it says the condition."""
        message = _optional(call.args, 1)
        return cls(call.args[0], str(call.args[0]) if message is None else str(message.value).strip())


@dataclass(frozen=True)
class RandomInit:
    """`T.rng_init`: the start of each thread's sequence of random numbers, and the name of the generator."""

    seed: ir.PrimExpr
    sequence: ir.PrimExpr
    offset: ir.PrimExpr
    generator: str

    @classmethod
    def of(cls, call: ir.Call) -> RandomInit:
        seed, sequence, offset, generator = call.args[:4]
        return cls(seed, sequence, offset, str(generator.value))


def distribution_of(call: ir.Call) -> str:
    """Distribution of the numbers of `T.rng_rand_float`: "uniform" or "normal"."""
    return str(call.args[0].value)
