# SPDX-License-Identifier: MIT
"""Argument checks of operators. Every error names the argument, the value found and the supported ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

import torch

from tilescale.comm.heap.lasting import lasting
from tilescale.errors import ArgumentError
from tilescale.ops.dtensors import is_dtensor
from tilescale.ops.group import size_of

MULTIPLE = 8
"""Columns are a multiple of this number: bulk copies move 16 bytes at least."""

GEMM_TYPES = (torch.bfloat16, torch.float16)
"""Types that tile programs multiply."""

SUMS = (*GEMM_TYPES, torch.float32)
"""Types of sums, made in float32; and of GEMMs, in float32 by PyTorch, without overlap."""

COMBINES = (*SUMS, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8)
"""Types of which there are sums, maxima and minima as PyTorch makes them, or in float32."""

OPS = ("sum", "max", "min")
"""Combinations of elements."""

MOVES = (*COMBINES, torch.int16, torch.bool, torch.complex64, torch.complex128)
"""Types that are moved."""

NARROW = (torch.float8_e4m3fn,)
"""Types of which there are GEMMs, with scales."""

SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that need scales."""

BLOCK = 128
"""Numbers of a row of a, and rows and columns of b, that share a block scale."""

_AS_BYTES = (*SCALED, torch.bool)

BYTES = (*MOVES, *SCALED)
"""Types that are moved byte by byte."""


def check_op(op: str, a: torch.Tensor) -> None:
    """Raise ArgumentError unless tensors like `a` can be combined so."""
    if op not in OPS:
        raise ArgumentError(f"op is {op!r}", hint=f"supported: {', '.join(OPS)}")
    if op != "sum" and a.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"a requires a gradient, op is {op!r}", hint="pass a.detach(), or use torch.no_grad()")


def check_tensor(
    name: str, x: torch.Tensor, dims: int | None = None, served: tuple[torch.dtype, ...] = GEMM_TYPES
) -> None:
    """Raise ArgumentError unless `x` is a tensor of a supported type with `dims` dimensions."""
    check_strided(name, x)
    if x.dtype not in served:
        raise ArgumentError(f"{name} is {x.dtype}", hint=f"supported: {', '.join(map(str, served))}: convert {name}")
    if dims is not None and x.ndim != dims:
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}", hint=f"{name} has {dims} dimensions: reshape it")


def check_strided(name: str, x: Any) -> None:
    """Raise ArgumentError unless `x` is a plain tensor, whose elements lie in memory by strides."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is {type(x).__name__}", hint=f"pass a tensor as {name}")
    if is_dtensor(x):
        raise ArgumentError(f"{name} is a DTensor", hint=f"pass this rank's part: {name}.to_local()")
    if x.is_nested:
        raise ArgumentError(f"{name} is a nested tensor", hint=f"pass its rows side by side: {name}.values()")
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name} is of layout {x.layout}", hint=f"convert it: {name}.to_dense()")


def as_autocast(*tensors: torch.Tensor | None) -> list[Any]:
    """Tensors of the type that torch.autocast says, where it is on, as PyTorch's own GEMMs take theirs."""
    if not torch._C._is_any_autocast_enabled():
        return list(tensors)
    return [_as_autocast(x) if isinstance(x, torch.Tensor) and x.dtype in SUMS else x for x in tensors]


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    return x if x.is_meta or not torch.is_autocast_enabled(kind) else x.to(torch.get_autocast_dtype(kind))


def as_moved(move: Callable[..., torch.Tensor], a: torch.Tensor, *given: Any) -> torch.Tensor:
    """Move a tensor of any type by `move`: see `as_numbers`."""
    made = move(as_numbers(a.resolve_conj()), *given)
    if a.is_complex():
        return torch.view_as_complex(made)
    return made.view(a.dtype) if a.dtype in _AS_BYTES else made


def as_numbers(a: torch.Tensor) -> torch.Tensor:
    """View the tensor in a type that can be moved: uint8 for types with few operations, real and imaginary parts for
    complex."""
    if a.is_complex():
        return torch.view_as_real(a)
    return a.view(torch.uint8) if a.dtype in _AS_BYTES else a


def check_like(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ArgumentError unless both have the same type and device."""
    for what in ("dtype", "device"):
        check_same(what, name, x, other_name, other)


def check_same(what: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ArgumentError unless both have the same type, or device."""
    if getattr(x, what) != getattr(other, what):
        raise ArgumentError(
            f"{name} is {getattr(x, what)}, {other_name} is {getattr(other, what)}", hint=f"give both the same {what}"
        )


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    b_name: str = "b",
    *,
    scaled: bool = False,
    rounds: bool = False,
    parts: int = 1,
) -> None:
    """Raises ArgumentError unless a (M, K), b (K, N) and bias (N,) or None belong together.

    Args:
        parts: of K, one of which a has.
        scaled: a and b are float8, b the transpose of a contiguous matrix, as tensor cores take it.
        rounds: whether they are rounded to float8.
    """
    if scaled and rounds:
        raise ArgumentError("scales and float8 are given", hint="float8 rounds a and b, scales are of float8 matrices")
    if not scaled and isinstance(a, torch.Tensor) and a.dtype in SCALED:
        raise ArgumentError(f"a is {a.dtype}", hint="give scales of a and b")
    served = NARROW if scaled else (torch.bfloat16,) if rounds else SUMS
    check_tensor("a", a, 2, served)
    check_tensor(b_name, b, 2, served)
    check_like(b_name, b, "a", a)
    if a.shape[1] * parts != b.shape[0]:
        of_a = "K" if parts == 1 else f"K / {parts}"
        raise ArgumentError(
            f"a has {a.shape[1]} columns, {b_name} has {b.shape[0]} rows",
            hint=f"a is (M, {of_a}), {b_name} is (K, N); for a weight of torch.nn.Linear pass weight.t()",
        )
    for what, extent in zip(("rows", "columns"), b.shape, strict=True):
        if not extent:
            raise ArgumentError(f"{b_name} has no {what}", hint=f"give {b_name} at least one row and column")
    if scaled and not b.t().is_contiguous():
        raise ArgumentError(
            f"{b_name} has strides {b.stride()}", hint="in float8: the transpose of a contiguous matrix"
        )
    for name, x in (("a", a), (b_name, b)) if scaled and torch.is_grad_enabled() else ():
        if x.requires_grad:
            raise ArgumentError(
                f"{name} is float8 and requires a gradient",
                hint="pass what was rounded, in bfloat16, with float8=tilescale.ops.Float8()",
            )
    if bias is not None:
        name = b_name.replace("b", "bias", 1)
        check_tensor(name, bias, 1, (torch.bfloat16,) if scaled else (a.dtype,))
        check_same("device", name, bias, "a", a)
        if bias.shape[0] != b.shape[1]:
            raise ArgumentError(
                f"{name} has {bias.shape[0]} elements, {b_name} has {b.shape[1]} columns", hint="one for each column"
            )


def result_type(a: torch.Tensor) -> torch.dtype:
    """The type of a GEMM's result."""
    return torch.bfloat16 if a.dtype in SCALED else a.dtype


def scales_of(scales: Any, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each row of a, (M,), and of each column of all weights; or of blocks, (M, K / 128), and of all
    weights, (sum of N / 128, K / 128).

    Raises ArgumentError unless there is a pair, of one number or one for each row of a, and the same for each weight;
    or of blocks.
    """
    of_a, of_b = two_scales(scales, "of the rows of a, and of the columns of b")
    given = list(of_b) if isinstance(of_b, Sequence) else [of_b]
    if len(given) != len(weights):
        raise ArgumentError(f"b is {len(weights)} matrices, scales[1] {len(given)}", hint="give scales of each")
    if _are_blocks([of_a, *given], a, weights):
        for i, x in enumerate((of_a, *given)):
            check_tensor(f"scales[{min(i, 1)}]", x, 2, (torch.float32,))
            check_same("device", f"scales[{min(i, 1)}]", x, "a", a)
        return of_a.contiguous(), torch.cat([x.t() for x in given]).contiguous()
    names = [f"scales[1][{i}]" for i in range(len(given))] if isinstance(of_b, Sequence) else ["scales[1]"]
    columns = [_each(name, x, w.shape[1], a) for name, x, w in zip(names, given, weights, strict=True)]
    return _each("scales[0]", of_a, len(a), a), columns[0] if len(columns) == 1 else torch.cat(columns)


def _are_blocks(scales: Sequence[Any], a: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether scales have the shapes of those of blocks, and not of rows and columns."""
    extents = (len(a), *(w.shape[1] for w in weights))
    if not all(isinstance(x, torch.Tensor) for x in scales):
        return False
    if all(x.numel() in (1, extent) for x, extent in zip(scales, extents, strict=True)):
        return False
    groups = -(-a.shape[1] // BLOCK)
    shapes = [(len(a), groups), *((groups, -(-w.shape[1] // BLOCK)) for w in weights)]
    return [tuple(x.shape) for x in scales] == shapes


def has_blocks(scales: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    """Whether these, as `scales_of` gives them, are of blocks."""
    return scales is not None and scales[1].ndim == 2


def two_scales(scales: Any, what: str) -> tuple[Any, Any]:
    """Both. Raises ArgumentError for anything but two things."""
    if not isinstance(scales, Sequence) or len(scales) != 2:
        found = f"{len(scales)} things" if isinstance(scales, Sequence) else type(scales).__name__
        raise ArgumentError(f"scales is {found}", hint=f"give two: {what}")
    return scales[0], scales[1]


def _each(name: str, scale: torch.Tensor, extent: int, a: torch.Tensor) -> torch.Tensor:
    """The scale of each row or column, (extent,)."""
    check_tensor(name, scale, None, (torch.float32,))
    check_same("device", name, scale, "a", a)
    if scale.numel() not in (1, extent):
        raise ArgumentError(
            f"{name} has {scale.numel()} numbers",
            hint=f"give one number for all, or {extent}; or of blocks: (M, K / {BLOCK}) and (K / {BLOCK}, N / {BLOCK})",
        )
    return scale.reshape(-1).expand(extent).contiguous()


def check_divides(name: str, x: torch.Tensor, dim: int, size: int) -> None:
    """Raise ArgumentError unless a dimension can be split among `size` ranks."""
    if x.shape[dim] % size:
        raise ArgumentError(
            f"dimension {dim} of {name} is {x.shape[dim]}, the group has {size} ranks",
            hint=f"pad {name} to a multiple of {size}",
        )


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, where bulk copies may begin, with the strides of a new tensor.

    An empty tensor is copied: its address is 0, and it passes for contiguous with any strides.
    """
    if x.is_contiguous() and (address := x.data_ptr()) and address % 16 == 0:
        return plain(x) if 1 in x.shape else x
    return x.clone(memory_format=torch.contiguous_format)


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, with the strides of a new one. PyTorch lets those of dimensions of one element be any: a
    slice has them, which cannot be viewed in another type, and differ from those that compiled graphs expect."""
    x = x.contiguous().resolve_neg()
    strides = tuple(accumulate(x.shape[:0:-1], lambda step, n: step * max(n, 1), initial=1))[::-1][: x.ndim]
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@cache
def unread(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Dummies of one element for a vector and a matrix that a program does not read."""
    vector = lasting(lambda: torch.zeros(1, dtype=dtype, device=device))
    return vector, vector.view(1, 1)


def operand(b: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The right operand of a GEMM as stored in memory, and whether that is its transpose, (N, K)."""
    if not b.is_contiguous() and (across := b.t()).is_contiguous():
        return dense(across), True
    return dense(b), False


def operands(matrices: list[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """`operand` for several matrices that need the same layout."""
    found = [operand(b) for b in matrices]
    if len({transposed for _, transposed in found}) == 1:
        return [right for right, _ in found], found[0][1]
    return [dense(b) for b in matrices], False


def check_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    a: torch.Tensor,
    *others: torch.Tensor | None,
    name: str = "out",
    dtype: torch.dtype | None = None,
) -> None:
    """Raise ArgumentError unless `out` is None or a tensor for a result of this shape, on the device of `a`.

    Args:
        others: further inputs that may require gradients.
        dtype: of the result; None is that of `a`.
    """
    if out is None:
        return
    check_tensor(name, out, None, (dtype or a.dtype,))
    check_same("device", name, out, "a", a)
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"{name} has shape {tuple(out.shape)}", hint=f"the result has shape {tuple(shape)}")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, out, *others)):
        raise ArgumentError(
            f"{name} is given where gradients are recorded", hint="leave out= away, or use torch.no_grad()"
        )


def check_count(name: str, n: Any, least: int = 1) -> None:
    """Raises ArgumentError unless it is an integer from a least one on."""
    if not isinstance(n, Integral) or isinstance(n, bool) or n < least:
        raise ArgumentError(f"{name} is {n!r}", hint=f"give an integer, {least} or more")


def check_rank(argument: str, rank: Any, group: str) -> None:
    """Raises ArgumentError unless it is the number of a rank of the group."""
    check_count(argument, rank, least=0)
    if rank >= size_of(group):
        raise ArgumentError(f"{argument} is {rank}, the group has {size_of(group)} ranks", hint="count from 0")


def check_number(name: str, x: Any) -> None:
    """Raise ArgumentError unless `x` is a Python number, but not a bool."""
    if not isinstance(x, Real) or isinstance(x, bool):
        raise ArgumentError(f"{name} is {x!r}", hint="give a number")


def check_flags(**flags: Any) -> None:
    """Raises ArgumentError for one that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(f"{name} is {flag!r}", hint="give True or False")


def check_dim(name: str, dim: int, x: torch.Tensor) -> int:
    """A dimension counted from 0. Raises ArgumentError for one that the tensor does not have."""
    if not isinstance(dim, int):
        raise ArgumentError(f"{name} is {dim!r}", hint="give the number of a dimension")
    if not -x.ndim <= dim < x.ndim:
        raise ArgumentError(f"{name} is {dim}, the tensor has {x.ndim} dimensions", hint="count from 0")
    return dim % x.ndim
