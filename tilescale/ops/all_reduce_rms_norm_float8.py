# SPDX-License-Identifier: MIT
"""All-reduce, residual and RMSNorm, with rows quantized to float8 for the next GEMM.

Where one kernel makes the norm, it quantizes as well, from its registers. Elsewhere PyTorch quantizes its result.
"""

from collections.abc import Sequence
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.all_reduce_rms_norm import algorithm_of, algorithms_of, by_two_kernels, check_outs, checked, rows_in
from tilescale.ops.arguments import GEMM_TYPES, check_same, check_tensor, dense
from tilescale.ops.group import collective, group_name, team_of
from tilescale.ops.kernels import kernel, kernels
from tilescale.ops.layout import delivered, dtype_of
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.rounding import FRACTION
from tilescale.program.norm import GROUP, LARGEST, LEAST, PACKED, packed_rows, packed_words
from tilescale.runtime.ahead import also_needed, is_dry

FLOAT8 = torch.float8_e4m3fn


@plain_calls_repeat
@collective
def all_reduce_rms_norm_float8(
    a: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    group_size: int | None = None,
    power_of_two: bool = False,
    packed: bool = False,
    return_normed: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: Sequence[torch.Tensor | None] | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, ...]:
    """As `all_reduce_rms_norm`, with normalised rows as float8_e4m3fn over their scales. Collective; has no gradient.

    Args:
        a, weight, residual, eps, weight_offset, group: as there, bfloat16 or float16.
        scale: float32, of one element: of all rows, the same on all ranks. None: each row, or each group, has one.
        group_size: None, or 128: the columns of a row that share a scale.
        power_of_two: whether the scales of rows and groups are rounded up to powers of two, as E8M0 has them.
        packed: whether the scales of groups are the exponents of such powers (UE8M0), four in an int32. Words of
            adjacent rows are adjacent, those of the next four groups begin at a multiple of 16 bytes, as in DeepGEMM.
        return_normed: whether to return the normalised rows of the type of `a`, too.
        out: the memory of the results, in their order; None for a new tensor, and for a scale that is given.

    Returns:
        The quantized rows, like `a`; their scales, float32: the scale that was given, (..., 1), or (..., features / 128
        rounded up), or packed ones, (..., features / 512 rounded up) of int32; the sum with the residual; and the
        normalised rows if they are asked for. A row or group has the
        scale with which its largest magnitude, or 1e-12, becomes 448.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    flat, given = checked(a, weight, residual, GEMM_TYPES, eps, weight_offset)
    if group_size not in (None, GROUP):
        raise ArgumentError(f"group_size is {group_size!r}", hint=f"supported: {GROUP}, or None for whole rows")
    if scale is not None and (group_size is not None or power_of_two):
        raise ArgumentError("scale is given with group_size or power_of_two", hint="these are of scales that are found")
    if packed and group_size is None:
        raise ArgumentError("packed is given without group_size", hint=f"pass group_size={GROUP}")
    if scale is not None:
        check_tensor("scale", scale, None, (torch.float32,))
        check_same("device", "scale", scale, "a", a)
        if scale.numel() != 1:
            raise ArgumentError(f"scale has shape {tuple(scale.shape)}", hint="pass one number")
    scaling = "tensor" if scale is not None else "packed" if packed else "group" if group_size else "row"
    options = scale, scaling, power_of_two, return_normed, eps, weight_offset, group_name(group)
    kind = torch.int32 if packed else torch.float32
    like, scales = (a.shape, a.dtype), ((*a.shape[:-1], _scales(a.shape[-1], scaling)), kind)
    wanted = [(a.shape, FLOAT8), scales, like, *([like] if return_normed else [])]
    check_outs(out, wanted, a, weight, residual)
    if out is None or _operator.is_seen:
        made = _operator(flat, weight, given, *options)
    else:
        places = [*rows_in(out, flat), None][:4]
        if packed:
            places[1] = _words_in(out[1], *flat.shape)
        made = _operator.plain(flat, weight, given, *options, places=places)
    if packed:
        made = made[0], _packed_rows(made[1], *flat.shape), *made[2:]
    results = [
        delivered(x.view(shape), place)
        for x, (shape, _), place in zip(made, wanted, out or [None] * len(wanted), strict=False)
    ]
    if scale is not None:
        results[1] = scale
    return tuple(results)


@operator("all_reduce_rms_norm_float8")
def _operator(
    a: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    scaling: str,
    power_of_two: bool,
    return_normed: bool,
    eps: float,
    weight_offset: float,
    group: str,
    *,
    places: Sequence[torch.Tensor | None] = (None,) * 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantized rows of matrices, computed scales, the sums that the rows are made of, and the unquantized rows."""
    quantized, scales, y, normed = _empty(a, scaling, return_normed, places)
    if not a.shape[0]:
        return quantized, scales, y, normed
    team, has_residual = team_of(group), residual is not None
    options = weight_offset, scaling, power_of_two, return_normed
    algorithm, how = algorithm_of(a, team), (a.shape[1], dtype_of(a), has_residual, eps)
    choice = lambda name: (by_one_kernel, team, *how, name, *options)  # noqa: E731
    if is_dry():
        others = by_two_kernels(a, has_residual, eps, weight_offset, team)
        also_needed(kernels, *map(choice, algorithms_of(a, team)), *others)
    if algorithm is None:
        rows, y = operator_of("all_reduce_rms_norm").function(a, weight, residual, eps, weight_offset, group)
        made, factors = _quantized(rows, scaling, power_of_two, scale)
        return made, factors, y, rows if return_normed else normed
    call = kernel(*choice(algorithm))
    added = weight[:1, None] if residual is None else dense(residual)
    rows = normed if return_normed else weight[:1, None]
    found = scales if scale is None else scale.view(1)
    call(dense(a), added, dense(weight), rows, y, quantized, found.view(-1) if scaling == "row" else found)
    return quantized, scales, y, normed


def _empty(
    a: torch.Tensor, scaling: str, return_normed: bool, places: Sequence[torch.Tensor | None] = (None,) * 4
) -> tuple[torch.Tensor, ...]:
    """Uninitialized results of a matrix, new where there is no place."""
    M, N = a.shape
    packed = (packed_words(M, N),), torch.int32
    scales = packed if scaling == "packed" else ((M, _scales(N, scaling)), torch.float32)
    kinds: list[tuple[tuple[int, ...], torch.dtype]]
    kinds = [((M, N), FLOAT8), scales, ((M, N), a.dtype), ((M if return_normed else 0, N), a.dtype)]
    pairs = zip(kinds, places, strict=True)
    return tuple(a.new_empty(shape, dtype=kind) if place is None else place for (shape, kind), place in pairs)


def _scales(N: int, scaling: str) -> int:
    """Number of scales that the kernel computes for a row, or of words of packed scales."""
    return {"tensor": 0, "row": 1, "group": -(-N // GROUP), "packed": -(-N // (GROUP * PACKED))}[scaling]


def _packed_rows(words: torch.Tensor, M: int, N: int) -> torch.Tensor:
    return words.as_strided((M, _scales(N, "packed")), (1, packed_rows(M)))


def _words_in(place: torch.Tensor | None, M: int, N: int) -> torch.Tensor | None:
    """The memory of packed scales of M rows; None where words lie in another order."""
    if place is None or place.ndim != 2 or place.stride() != (1, packed_rows(M)):
        return None
    return place.as_strided((packed_words(M, N),), (1,))


def _quantized(
    rows: torch.Tensor, scaling: str, power_of_two: bool, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are there, by PyTorch's operations."""
    M, N = rows.shape
    wide = rows.float()
    if given is not None:
        return _float8(wide / given), wide.new_empty(M, 0)
    size = N if scaling == "row" else GROUP
    groups = torch.nn.functional.pad(wide, (0, -N % size)).view(M, -1, size)
    scales = groups.abs().amax(2).clamp(min=LEAST) / LARGEST
    scales = scales.log2().ceil().exp2() if power_of_two or scaling == "packed" else scales
    made = _float8((groups / scales[..., None]).view(M, -1)[:, :N].contiguous())
    return made, _packed(scales, N) if scaling == "packed" else scales


def _packed(scales: torch.Tensor, N: int) -> torch.Tensor:
    """The exponents of powers of two, (rows, groups), as words."""
    exponents = (scales.view(torch.int32) >> FRACTION).to(torch.uint8)
    words = torch.nn.functional.pad(exponents, (0, -scales.shape[1] % PACKED)).view(torch.int32)
    made = words.new_empty(packed_words(len(scales), N))
    _packed_rows(made, len(scales), N).copy_(words)
    return made


def _float8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


_operator.register_fake(lambda a, w, r, s, scaling, power, return_normed, *_: _empty(a, scaling, return_normed))


def by_one_kernel(
    size: int,
    N: int,
    dtype: str,
    has_residual: bool,
    eps: float,
    algorithm: str,
    offset: float,
    scaling: str,
    power_of_two: bool,
    return_normed: bool,
) -> Any:
    """All of it, for any number of rows."""
    M, groups, packed = T.dynamic("M"), -(-N // GROUP), scaling == "packed"
    scales = {"tensor": (1,), "row": (M,), "group": (M, groups), "packed": (T.dynamic("words"),)}[scaling]

    @T.prim_func
    def all_reduce_rms_norm_float8(
        X: T.Tensor((M, N), dtype),
        R: T.Tensor((M, N) if has_residual else (1, 1), dtype),
        W: T.Tensor((N,), dtype),
        Out: T.Tensor((M, N) if return_normed else (1, 1), dtype),
        Y: T.Tensor((M, N), dtype),
        Q: T.Tensor((M, N), "float8_e4m3fn"),
        S: T.Tensor(scales, "int32" if packed else "float32"),
    ):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.allreduce_rms_norm(
                    X,
                    W,
                    Out if return_normed else None,
                    Y,
                    residual=R if has_residual else None,
                    eps=eps,
                    impl=algorithm,
                    weight_offset=offset,
                    quantized=Q,
                    scales=S,
                    scaling="group" if packed else scaling,
                    power_of_two=power_of_two or packed,
                )

    return all_reduce_rms_norm_float8
