# SPDX-License-Identifier: MIT
"""Copies of four arbitrary rows of a tensor by TMA (PTX ISA, "tile::gather4" and "tile::scatter4")."""

from __future__ import annotations

from typing import Any

from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region


def rows_copy(compiler: Compiler, source: Region, target: Region, notes: Any) -> Closure:
    """The closure of a copy whose annotations name rows of the tensor, and the first column."""
    rows, column = [compiler.expr(r) for r in notes["gather4_rows"]], compiler.expr(notes["gather4_col"])
    tensor, tile = (target, source) if "is_scatter4" in notes else (source, target)

    def run(frame: Frame) -> None:
        array, held, first = tensor.home.array(frame), tile.home.array(frame), uniform(column(frame), frame, "a column")
        for number, row in enumerate(rows):
            there = Block(array, (uniform(row(frame), frame, "a row"), first), (1, held.shape[1]))
            here = Block(held, (number, 0), (1, held.shape[1]))
            from_, to = (there, here) if tensor is source else (here, there)
            target.store(frame, to, source.load(frame, from_))

    return run if compiler.data else lambda frame: None
