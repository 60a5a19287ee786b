# SPDX-License-Identifier: MIT
"""Tensors of any shape as parts of rows of a fixed width, as the programs of the collectives take them.

A width that is known to programs lets them move 16 bytes at a time; the number of rows is an argument of the call. Each
view costs the host a part of the time of a small collective: a tensor that needs no padding is seen as rows at once.
"""

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

import torch

from tilescale.ops.arguments import dense

WIDTHS = (512, 64, 8)
"""Elements of a row, the widest that fits without padding."""

TILE = 4096
"""Elements that one block takes."""

THREADS = 256

ALIGNMENT = 256
"""Bytes at a multiple of which tensors begin in a common allocation; bulk copies ask for 128."""

CHUNK_BYTES = 4 << 20
"""Largest size that is sent at once: enough for a copy engine's full rate."""

CHUNKS = 1024
"""Flags for the chunks of one part: enough for 4 GiB."""


def place_in(out: torch.Tensor | None, dim: int) -> torch.Tensor | None:
    """The memory of `out` if it has the parts of ranks in their order, else None."""
    return None if out is None or dim else _in_place(out)


def delivered(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result, in `out` if there is one: written there already, or copied."""
    if out is None:
        return made
    return out if made.data_ptr() == out.data_ptr() else out.copy_(made)


def room_for(out: torch.Tensor | None, shape: Sequence[int], a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result of this shape: that of `out` where programs may write it, else a new tensor like `a`."""
    place = None if out is None or tuple(out.shape) != tuple(shape) else _in_place(out)
    return a.new_empty(shape, dtype=dtype) if place is None else place


def _in_place(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor as programs take it, where it is; None if that were a copy."""
    made = dense(x)
    return made if made.data_ptr() == x.data_ptr() else None


def adjacent(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """The rows of all tensors, where they are adjacent in the memory of the first one's storage."""
    first, *others = parts
    end = first.data_ptr()
    for part, other in pairwise(parts):
        end += part.nbytes
        if not (part.is_contiguous() and other.is_contiguous() and other.data_ptr() == end):
            return None
    storage = first.untyped_storage()
    if others and end + others[-1].nbytes > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def new_tensors(
    like: torch.Tensor, *forms: tuple[Sequence[int], torch.dtype], apart: Collection[int] = ()
) -> list[torch.Tensor]:
    """Uninitialized tensors of shapes and types on the device of `like`, in one allocation: each allocation takes the
    host as long as a part of a launch.

    `apart`: numbers of those that have their own, since an operator returns them.
    """
    sizes = [0 if i in apart else math.prod(shape) * dtype.itemsize for i, (shape, dtype) in enumerate(forms)]
    ends = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    memory = like.new_empty(ends[-1], dtype=torch.uint8)
    return [
        like.new_empty(shape, dtype=dtype) if i in apart else memory[at : at + size].view(dtype).view(shape)
        for i, (at, size, (shape, dtype)) in enumerate(zip(ends, sizes, forms, strict=False))
    ]


def chunk_rows(width: int, itemsize: int) -> int:
    """Rows of a chunk: a whole number of tiles."""
    return CHUNK_BYTES // (width * itemsize)


def tile_rows(width: int) -> int:
    """Rows that one block takes."""
    return TILE // width


def shape_with(a: torch.Tensor, dim: int, extent: int) -> list[int]:
    """The shape of a tensor with another extent of a dimension."""
    return [extent if i == dim else n for i, n in enumerate(a.shape)]


def row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.itemsize


def rows_of_bytes(*matrices: torch.Tensor) -> torch.Tensor:
    """The rows of matrices of any types, side by side as bytes, padded to a multiple of what bulk copies move, 16."""
    flat = torch.cat([x.contiguous().view(torch.uint8) for x in matrices], 1)
    missing = -flat.shape[1] % 16
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def more_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor (n, ...) extended to `rows` rows: itself, or a copy padded with zeros."""
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def dtype_of(x: torch.Tensor) -> str:
    """The name in programs of a tensor's data type."""
    return dtype_name(x.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A data type's name in programs."""
    return str(dtype).removeprefix("torch.")


def split(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The tensor with the parts of a dimension one after the other: (parts * ..., ...) in front."""
    return x if dim == 0 else torch.cat(x.chunk(parts, dim))


def join(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The inverse of `split`."""
    return x if dim == 0 else torch.cat(x.chunk(parts), dim)
