# SPDX-License-Identifier: MIT
"""The keys and values that decoding reads: contiguous or in pages, of the queries' type or float8 with scales.

Pages are laid out as in vLLM and FlashInfer: a block table names those of each sequence, in any order, and the pages of
keys and of values may alternate in one tensor. Tiles of float8 are converted on chip; scales of keys are applied to the
scores, those of values to the output.
"""

import math
from itertools import product
from typing import Any, NamedTuple

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import NARROW, check_same, check_tensor, dense, unread
from tilescale.ops.layout import dtype_of

KEYS = 64
"""Keys of a step."""

SWIZZLED = 64
"""Columns of 16 bits in 128 bytes."""

BULK = 256
"""Columns of a bulk copy, at most."""

FEW = 16
"""Contiguous keys of a step at which the barriers of their copies leave no space for a second step of latents."""

PAGES = (16, 256)
"""Keys of a page, at least and at most: multiples of the first, as tensor cores multiply."""


class CacheLayout(NamedTuple):
    """Memory layout of a cache.

    Attributes:
        dtype: of its elements.
        page: keys of a page; 0 where the keys of a sequence are contiguous.
        apart: distance of a page to the next one, in pages.
    """

    dtype: str
    page: int = 0
    apart: int = 1

    @property
    def is_narrow(self) -> bool:
        """Whether elements are float8."""
        return self.dtype.startswith("float8")

    @property
    def together(self) -> int:
        """Keys of a step that are contiguous."""
        return math.gcd(self.page, KEYS) if self.page else KEYS


def check_cache(name: str, x: torch.Tensor, dims: int, q: torch.Tensor, table: torch.Tensor | None) -> None:
    """Raise ArgumentError unless `x` is a cache for queries q, with `dims` dimensions, with or without pages."""
    check_tensor(name, x, dims, (q.dtype, *NARROW))
    check_same("device", name, x, "q", q)
    if table is None:
        if len(x) != len(q):
            raise ArgumentError(f"{name} has {len(x)} sequences, q {len(q)}", hint="as many, or give a block_table")
        return
    low, high = PAGES
    if x.shape[1] % low or not low <= x.shape[1] <= high:
        raise ArgumentError(
            f"pages of {name} have {x.shape[1]} keys", hint=f"supported: multiples of {low} up to {high}"
        )
    if not len(x):
        raise ArgumentError(f"{name} has no pages", hint=f"give {name} at least one")
    if not x[0].is_contiguous() or x.stride(0) % max(x[0].numel(), 1):
        raise ArgumentError(
            f"{name} has strides {x.stride()}",
            hint="each page is contiguous, and pages are a whole number of pages apart: no copy of a cache is made",
        )


def check_table(table: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ArgumentError unless `table` is None or a block table for queries q."""
    if table is None:
        return
    check_tensor("block_table", table, 2, (torch.int32,))
    check_same("device", "block_table", table, "q", q)
    if table.shape[0] != len(q) or not table.shape[1]:
        raise ArgumentError(
            f"block_table has shape {tuple(table.shape)}, q {len(q)} sequences", hint="(batch, pages), one at least"
        )


def check_scale(name: str, scale: torch.Tensor | None, cache_name: str, cache: torch.Tensor, heads: int) -> None:
    """Raise ArgumentError unless `scale` is None or scales of a float8 cache, one or one for each head of keys."""
    if scale is None:
        return
    check_tensor(name, scale, None, (torch.float32,))
    check_same("device", name, scale, cache_name, cache)
    if cache.dtype not in NARROW:
        raise ArgumentError(f"{name} is given, {cache_name} is {cache.dtype}", hint="scales are of float8 caches")
    if scale.numel() not in (1, heads):
        raise ArgumentError(f"{name} has {scale.numel()} numbers", hint=f"give one for all, or {heads}")


def cache_of(x: torch.Tensor, table: torch.Tensor | None) -> CacheLayout:
    """Memory layout of a checked cache."""
    if table is None:
        return CacheLayout(dtype_of(x))
    return CacheLayout(dtype_of(x), x.shape[1], x.stride(0) // x[0].numel() if len(x) > 1 else 1)


def in_memory(x: torch.Tensor, of: CacheLayout) -> torch.Tensor:
    """A cache as programs take it, with the pages between its own, if there are some."""
    if of.apart != 1:
        x = x.as_strided(((len(x) - 1) * of.apart + 1, *x.shape[1:]), (x[0].numel(), *x.stride()[1:]))
    return dense(x)


def table_of(table: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """A block table as programs take it."""
    return unread(torch.int32, q.device)[1] if table is None else dense(table)


def scales_of_heads(scale: torch.Tensor | None, heads: int, of: CacheLayout, q: torch.Tensor) -> torch.Tensor:
    """The scale of each head of keys, (heads,), 1 by default; an unread dummy without scales."""
    if not of.is_narrow:
        return unread(torch.float32, q.device)[0]
    return q.new_ones(heads, dtype=torch.float32) if scale is None else dense(scale.reshape(-1).expand(heads))


def room_for_keys(cache: Any, table: Any, of: CacheLayout) -> Any:
    """Keys that a sequence has at most, in a program."""
    return table.shape[1] * of.page if of.page else cache.shape[1]


def load_keys(
    cache: Any, table: Any, b: Any, at: Any, count: Any, head: Any, columns: slice, tile: Any, of: CacheLayout
) -> None:
    """Columns of the keys of a step, in a program. Entries of the table after the last key are not read."""
    if not of.page:
        load_contiguous(cache, b, at, head, columns, tile)
        return
    high, wide = of.together, int(tile.shape[1])
    # Rows of a tile that tensor cores read are contiguous within its swizzled columns, of others within a bulk copy's.
    each = wide if high == KEYS else min(wide, BULK) if of.is_narrow else SWIZZLED
    for row, column in product(range(0, KEYS, high), range(0, wide, each)):
        load_of_page(cache, table, b, at, count, head, columns.start + column, tile, (row, high), (column, each), of)


def stages(of: CacheLayout, is_latent: bool) -> int:
    """Steps whose keys are on chip at once."""
    return 1 if is_latent and of.together <= FEW and not of.is_narrow else 2


@T.macro
def load_contiguous(cache, b, at, head, columns, tile):
    """The keys of a step of one sequence."""
    T.copy(cache[b, at : at + KEYS, head, columns], tile)


@T.macro
def load_of_page(cache, table, b, at, count, head, column, tile, rows, columns, of):
    """A part of the keys of one page into a part of a tile: rows and columns from the first of two numbers."""
    (row, high), (left, wide) = rows, columns
    T.copy(
        cache[
            table[b, T.min(at + row, count - 1) // of.page] * of.apart,
            (at + row) % of.page : (at + row) % of.page + high,
            head,
            column : column + wide,
        ],
        tile[row : row + high, left : left + wide],
    )
