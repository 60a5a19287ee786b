# SPDX-License-Identifier: MIT
"""Typed views of instructions of tensor cores, and of descriptors of the matrices that they read."""

from __future__ import annotations

from dataclasses import dataclass

from tilelang_core import ir, tl


@dataclass(frozen=True)
class WarpGemm:
    """`mma`: a GEMM of a warp's fragments, each a data variable and the position of a thread's first element.

    Attributes:
        shape, layouts, types: as PTX names them: "m16n8k16", ("row", "col"), of a, b and the accumulator.
        fragments: of a, b and the accumulator.
    """

    shape: str
    layouts: tuple[str, str]
    types: tuple[str, str, str]
    fragments: tuple[tuple[ir.Var, ir.PrimExpr], ...]

    @classmethod
    def of(cls, call: ir.Call) -> WarpGemm:
        shape, *words = (str(arg.value) for arg in call.args[:6])
        fragments = tuple((call.args[i], call.args[i + 1]) for i in (6, 8, 10))
        return cls(shape, (words[0], words[1]), (words[2], words[3], words[4]), fragments)


def bytes_behind(pointer: ir.Call) -> tuple[ir.PrimExpr, ir.PrimExpr]:
    """The pointer and the byte offset of `tl.HANDLE_ADD_BYTE_OFFSET`."""
    return pointer.args[0], pointer.args[1]


def moved_descriptor(call: ir.Call) -> tuple[ir.BufferLoad, ir.PrimExpr]:
    """The element with a descriptor and by how many bytes `tl.INCREASE_DESCRIPTOR_OFFSET` moves its matrix."""
    return call.args[0], call.args[1]


@dataclass(frozen=True)
class MatrixDescriptor:
    """Fields of a descriptor of a matrix in shared memory.

    Attributes:
        target: the element that holds the descriptor.
        start: a pointer to where the matrix begins.
        leading, stride: distances of core matrices, in units of 16 bytes.
        swizzle: by no, 128, 64 or 32 bytes, as 0 to 3; None for another kind, or with an offset.
    """

    target: ir.BufferLoad
    start: ir.PrimExpr
    leading: int
    stride: int
    swizzle: int | None

    @classmethod
    def of(cls, call: ir.Call) -> MatrixDescriptor:
        """A call that makes one for `wgmma` or `tcgen05`."""
        numbers = [ir.integer(arg) for arg in call.args[2:]]
        if ir.op_name(call) == tl.INITIALIZE_WGMMA_DESCRIPTOR:
            swizzle, leading, stride = numbers
            return cls(call.args[0], call.args[1], leading, stride, swizzle)
        leading, stride, base, is_absolute, swizzle = numbers
        is_plain = not (base or is_absolute or swizzle % 2)
        return cls(call.args[0], call.args[1], leading, stride, swizzle // 2 if is_plain else None)


@dataclass(frozen=True)
class WarpGroupGemm:
    """`wgmma`: a GEMM of 64 rows by a warpgroup, with operands in shared memory; a may be in registers.

    Attributes:
        shape: as PTX names it: "m64n64k16".
        along_k: whether elements along K follow one another in memory; of a (None in registers) and of b.
        operands: of a and b the data variable, of a descriptor or a fragment, and an offset: in units of 16 bytes, or
            the position of a thread's first element.
        accumulator: its data variable and the position of a thread's first element.
        adds: whether the accumulator's values are added.
        signs: of a and b.
    """

    shape: str
    along_k: tuple[bool | None, bool]
    operands: tuple[tuple[ir.Var, ir.PrimExpr], tuple[ir.Var, ir.PrimExpr]]
    accumulator: tuple[ir.Var, ir.PrimExpr]
    adds: ir.PrimExpr
    signs: tuple[int, int]

    @classmethod
    def of(cls, call: ir.Call) -> WarpGroupGemm:
        in_registers = ir.op_name(call) == tl.PTX_WGMMA_RS
        majors = [None, *call.args[1:2]] if in_registers else call.args[1:3]
        a, b = (None if major is None else bool(ir.integer(major)) for major in majors)
        a_data, a_offset, b_data, b_offset, data, position, adds, *signs = call.args[len(call.args) - 9 :]
        negated = [ir.integer(sign) < 0 for sign in signs]
        return cls(
            str(call.args[0].value), (a, bool(b)), ((a_data, a_offset), (b_data, b_offset)), (data, position), adds,
            (-1 if negated[0] else 1, -1 if negated[1] else 1),
        )  # fmt: skip


@dataclass(frozen=True)
class TensorMemoryGemm:
    """`tcgen05.mma`: a GEMM in tensor memory.

    Attributes:
        a, b: the data variable of a descriptor and an offset in bytes; of a, or of a tile in tensor memory and an
            address in it.
        total: the data variable of the accumulator, and `total_at`, an address in it.
        form: the instruction descriptor.
        adds: whether the accumulator's values are added.
        is_special: whether two thread blocks make it, or lanes are masked.
    """

    a: tuple[ir.Var, ir.PrimExpr]
    b: tuple[ir.Var, ir.PrimExpr]
    total: ir.Var
    total_at: ir.PrimExpr
    form: ir.PrimExpr
    adds: ir.PrimExpr
    is_special: bool

    @classmethod
    def of(cls, call: ir.Call) -> TensorMemoryGemm:
        _, a, a_at, b, b_at, total, total_at, form, adds, *special = call.args
        masks_and_blocks = [*special[:4], special[-1]]
        is_special = any(ir.constant(flag) != 0 for flag in masks_and_blocks)
        return cls((a, a_at), (b, b_at), total, total_at, form, adds, is_special)
