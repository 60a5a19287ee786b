# SPDX-License-Identifier: MIT
"""Layout of a tile or tensor over the units of a level: copied to each, or split along one dimension.

A split is block-cyclic: index i of the dimension belongs to unit (i // block) % size (ScaLAPACK's one-dimensional
distribution). Blocks of extent/size give contiguous shares, blocks of 1 a cyclic distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.errors import LayoutError, ShapeError
from tilescale.hda.units import format_count

RECOGNISED = (
    "T.Replica, T.FullRow, T.FullCol, T.Shard(dim), T.Shard(dim, block=b), or a function of the indices that splits "
    "one dimension into equal shares: i // (N // size) (blocks), i % size (cyclic), (i // b) % size (block-cyclic)"
)

SAMPLES = 4096
"""Number of indices at which a layout function is compared with the recognised layout."""


@dataclass(frozen=True)
class Layout:
    """A distribution over `size` units.

    Attributes:
        dim: the dimension that is split (negative counts from the end), or None for a replica on every unit.
        block: elements per block along `dim`; None means one contiguous share per unit.
    """

    dim: int | None = None
    block: int | None = None

    @property
    def is_replica(self) -> bool:
        """Whether every unit holds the whole."""
        return self.dim is None

    def axis(self, rank: int) -> int | None:
        """The split dimension as a non-negative number for a tile of `rank` dimensions.

        Raises:
            LayoutError: the tile has no such dimension.
        """
        if self.dim is None:
            return None
        axis = self.dim + rank if self.dim < 0 else self.dim
        if not 0 <= axis < rank:
            raise LayoutError(
                f"the layout splits dimension {self.dim}, but the tile has {rank} dimensions",
                hint="choose a dimension that the tile has, or T.Replica",
            )
        return axis

    def shard_shape(self, shape: Sequence[Any], size: Any) -> list[Any]:
        """The shape that one of `size` units holds of a tile of `shape`. Extents may be symbolic.

        Raises:
            ShapeError: constant extents that do not divide into equal shares.
        """
        axis = self.axis(len(shape))
        result = list(shape)
        if axis is None:
            return result
        extent, step = shape[axis], self.block or 1
        if isinstance(extent, int) and isinstance(size, int) and extent % (size * step):
            blocks = f" in blocks of {self.block}" if self.block else ""
            raise ShapeError(
                f"dimension {axis} of {tuple(shape)} has {extent} elements, which do not divide{blocks} among {size} "
                "units",
                hint=f"make the extent a multiple of {size * step}, split another dimension, or use T.Replica",
            )
        result[axis] = extent // size
        return result


Replica = Layout()
FullRow = Layout(dim=0)
FullCol = Layout(dim=-1)


def Shard(dim: int, block: int | None = None) -> Layout:  # noqa: N802 - a name of the language
    """Split along `dim`; `block` elements at a time go round the units (None: one contiguous share each).

    Raises:
        LayoutError: dim is not an integer, or block not a positive one.
    """
    if not isinstance(dim, int):
        raise LayoutError(f"T.Shard({dim!r}): a dimension is named by its number", hint=RECOGNISED)
    if block is not None and (not isinstance(block, int) or block < 1):
        raise LayoutError(f"T.Shard(block={block!r}): a block is a positive number of elements", hint=RECOGNISED)
    return Layout(dim=dim, block=block)


def from_function(function: Callable[..., Any], shape: Sequence[Any], size: Any) -> Layout:
    """The layout that a function from indices to rank describes.

    Raises:
        LayoutError: extents or size are not constants, or the function is not a recognised one.
        ShapeError: the dimension that it splits does not divide among the units.
    """
    if not isinstance(size, int) or not all(isinstance(n, int) for n in shape):
        raise LayoutError(
            f"a layout function needs constant extents and a constant number of units, got {tuple(shape)} over {size}",
            hint="name the layout instead: T.FullRow, T.FullCol, T.Shard(dim), T.Shard(dim, block=b)",
        )
    rank_of = _called(function, shape)
    ranks = [_ranks_along(rank_of, shape, axis) for axis in range(len(shape))]
    split = [axis for axis, values in enumerate(ranks) if len(set(values)) > 1]
    if size == 1 and not split:
        return Layout(dim=0)
    if len(split) != 1:
        found = "no dimension" if not split else "dimensions " + ", ".join(map(str, split))
        raise LayoutError(f"the layout function splits {found}; exactly one can be split", hint=RECOGNISED)
    return _block_cyclic(rank_of, ranks[split[0]], split[0], shape, size)


RankOf = Callable[[Sequence[int]], int]
"""The unit to which an index belongs."""


def _called(function: Callable[..., Any], shape: Sequence[int]) -> RankOf:
    def rank_of(index: Sequence[int]) -> int:
        try:
            return int(function(*index))
        except Exception as error:  # noqa: BLE001 - any exception of a user's function
            raise LayoutError(
                f"the layout function failed for index {tuple(index)} of a tile {tuple(shape)}: {error}",
                hint="it takes one index for each dimension and returns a rank",
            ) from error

    return rank_of


def _ranks_along(rank_of: RankOf, shape: Sequence[int], axis: int) -> list[int]:
    zeros = [0] * len(shape)
    return [rank_of([*zeros[:axis], i, *zeros[axis + 1 :]]) for i in range(shape[axis])]


def _block_cyclic(rank_of: RankOf, ranks: list[int], axis: int, shape: Sequence[int], size: int) -> Layout:
    Layout(dim=axis).shard_shape(shape, size)  # an extent that does not divide has an error of its own
    block = next((i for i, r in enumerate(ranks) if r != ranks[0]), len(ranks))
    wanted = [(i // block) % size for i in range(len(ranks))]
    agrees = all(rank_of(index) == ranks[index[axis]] for index in _samples(shape))
    if ranks != wanted or len(ranks) % (block * size) or not agrees:
        raise LayoutError(
            f"the layout function is not a block or cyclic split of dimension {axis} over "
            f"{format_count(size, 'unit')}: indices 0.. go to units {ranks[:8]}{'...' if len(ranks) > 8 else ''}",
            hint=RECOGNISED,
        )
    return Layout(dim=axis, block=None if block * size == len(ranks) else block)


def _samples(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of a shape, or some thousands of them, spread evenly."""
    total = math.prod(shape)
    # An odd step visits all residues of the powers of two that extents tend to be.
    step = 1 if total <= SAMPLES else total // SAMPLES | 1
    for linear in range(0, total, step):
        index = []
        for extent in reversed(shape):
            linear, i = divmod(linear, extent)
            index.append(i)
        yield tuple(reversed(index))
