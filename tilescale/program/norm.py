# SPDX-License-Identifier: MIT
"""Post-processing of the result of an all-reduce: the norm of its rows, and their quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.errors import ShapeError

GROUP, LEAST, LARGEST = 128, 1e-12, 448.0
"""Columns with one scale; the least magnitude that a scale is computed from; the largest number of float8_e4m3fn."""

PACKED, PACKED_TYPE = 4, "int32"
"""Exponents in a word of packed scales, and the type of a word."""

NORM_TILES = ("weight", "bias", "normed", "residual", "quantized", "scales")
"""Additional tiles of an all-reduce with a norm."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450) of the rows of a sum with a residual.

    Attributes:
        weight: one element for each column.
        bias: one element for each column, added to the normalised rows; None if there is none.
        normed: the tile for the normalised rows; None if they are not stored.
        residual: the tile that is added to the sum first; None if there is none.
        quantized: the tile for the normalised rows as float8; None if they are not quantized.
        scales: divisors before quantization: one given number where `scaling` is "tensor"; else the largest magnitude
            of a row, or of 128 columns of it, becomes the largest number of float8.
        eps: is added to the mean of the squares, or to the variance.
        offset: is added to the weight.
        scaling: "tensor", "row" or "group"; None where nothing is quantized.
        power: whether scales are powers of two.
        packed: whether they are exponents, four in a word of int32.
        centered: whether the mean of a row is subtracted: LayerNorm.
        columns: of a row; None if they are known at launch only.
    """

    weight: ir.Call
    bias: ir.Call | None
    normed: ir.Call | None
    residual: ir.Call | None
    quantized: ir.Call | None
    scales: ir.Call | None
    eps: float
    offset: float
    scaling: str | None
    power: bool
    packed: bool
    centered: bool
    columns: int | None

    @classmethod
    def of(cls, call: ir.Call, tiles: Sequence[ir.Call]) -> Norm | None:
        """The norm of a collective with these tiles; None if it has none."""
        names = ir.attribute(call, "norm")
        if names is None:
            return None
        source, _, *others = tiles
        given = dict.fromkeys(NORM_TILES) | dict(zip(names.split(), others, strict=True))
        scales = given["scales"]
        return cls(
            **given,
            eps=float(ir.attribute(call, "eps")),
            offset=float(ir.attribute(call, "offset")),
            scaling=ir.attribute(call, "scaling"),
            power=bool(ir.attribute(call, "power")),
            packed=scales is not None and str(ir.region_parts(scales)[0].dtype) == PACKED_TYPE,
            centered=bool(ir.attribute(call, "centered")),
            columns=ir.constant(ir.region_parts(source)[2][-1]),
        )

    @property
    def read(self) -> tuple[ir.Call, ...]:
        """Tiles that are read in addition to the sum."""
        given = self.weight, self.bias, self.residual, self.scales if self.scaling == "tensor" else None
        return tuple(tile for tile in given if tile is not None)

    @property
    def written(self) -> tuple[ir.Call, ...]:
        """Tiles that are written in addition to the sum."""
        made = self.normed, self.quantized, None if self.scaling == "tensor" else self.scales
        return tuple(tile for tile in made if tile is not None)


def packed_rows(rows: int) -> int:
    """Words from one word of a row's packed scales to its next: other rows' are between, padded to 16 bytes for TMA."""
    return -(-rows // 4) * 4


def packed_words(rows: int, columns: int) -> int:
    """Number of words of packed scales."""
    return (-(-columns // (GROUP * PACKED)) - 1) * packed_rows(rows) + rows


def check_packed(words: int, rows: int, columns: int, where: Any = None) -> None:
    """Raise ShapeError unless packed scales have this number of words."""
    wanted = packed_words(rows, columns)
    if words != wanted:
        raise ShapeError(f"scales has {words} words", hint=f"{rows} rows of {columns} have {wanted}", where=where)
