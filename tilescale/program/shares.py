# SPDX-License-Identifier: MIT
"""Operand sharding of a GEMM that a cluster executes as one unit.

Each program computes its rows (or columns) of the result. It needs its share of one operand and all of the other one.
Two programs that multiply as a pair hold half of each operand.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilelang_core import ir, tl
from tilelang_core.tiles import Gemm, data_of
from tilescale.hda import Machine
from tilescale.program import ops
from tilescale.program.effects import phases
from tilescale.program.model import Launch
from tilescale.program.operations import TileView

PAIRS = "cta-pair"
"""The capability of machines that multiply the operands of two programs by one instruction."""

ROWS = 128
"""Rows of a pair's accumulator in each program."""


def split(product: Gemm, by_rows: bool, pair: bool) -> dict[ir.Var, int | None]:
    """Data variable of each operand -> the dimension along which programs split it, None if each holds all of it.

    Args:
        by_rows: whether the result is split by rows, else by columns.
        pair: whether two programs multiply as a pair.
    """
    a, b, c = map(data_of, product.operands)
    along_m, along_n = int(product.transpose_a), int(not product.transpose_b)
    if by_rows:
        return {a: along_m, b: along_n if pair else None, c: 0}
    return {a: None, b: along_n, c: 1}


def paired(machine: Machine, launch: Launch, tiles: Iterable[ir.Buffer]) -> bool:
    """Whether the two programs of a cluster may multiply tiles A, B and C as a pair, split by rows."""
    a, b, c = tiles
    shape = ir.constants(c.shape)
    if not machine.has(PAIRS) or launch.cluster_size != 2 or launch.cluster[2] != 1 or shape is None:
        return False
    rows, columns = shape
    operands = all(t.scope() == "shared.dyn" and str(t.dtype) in ("float16", "bfloat16") for t in (a, b))
    fits = rows == 2 * ROWS and columns % 32 == 0 and columns <= 256
    return fits and operands and str(c.dtype) == "float32" and c.scope() == "local.fragment"


def held_whole(machine: Machine, launch: Launch) -> set[ir.Var]:
    """Data variables of the cluster's tiles of which each program holds all."""
    owned = {data for data, level in launch.owners if machine.level(level).kind == "cluster"}
    tiles = {buffer.data: buffer for buffer in launch.buffers if buffer.data in owned}
    products: list[Gemm] = []
    by_columns: set[ir.Var] = set()

    def visit(node: ir.Node) -> None:
        if ir.op_name(node) == tl.GEMM and all(data_of(region) in tiles for region in Gemm.of(node).operands):
            products.append(Gemm.of(node))
        elif ir.op_name(node) == ops.VIEW.name and TileView.of(node).layout.dim == 1:
            by_columns.add(TileView.of(node).base.data)

    for phase, _ in phases(launch):
        ir.walk(phase.stmt, visit)
    whole: set[ir.Var] = set()
    for product in products:
        operands = [data_of(region) for region in product.operands]
        pair = paired(machine, launch, [tiles[data] for data in operands])
        whole |= {data for data, dim in split(product, operands[2] not in by_columns, pair).items() if dim is None}
    return whole
