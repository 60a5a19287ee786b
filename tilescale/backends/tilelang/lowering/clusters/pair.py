# SPDX-License-Identifier: MIT
"""Products of two thread blocks on Blackwell: one instruction multiplies with the operands of both.

The accumulator lies in tensor memory, each block holding its rows; each block holds half of the columns of B. The first
block issues for both, and both learn of the end (PTX: tcgen05.mma with .cta_group::2). Other operations see the
accumulator in registers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Fill, Gemm, data_of
from tilescale.backends.tilelang.lowering.clusters.dsmem import ClusterStage
from tilescale.backends.tilelang.lowering.clusters.regions import regions, stored
from tilescale.backends.tilelang.lowering.clusters.sharding import ClusterShards
from tilescale.backends.tilelang.lowering.role_graph import mbarriers
from tilescale.program.shares import ROWS

ACCESS = (ir.BufferLoad, ir.BufferStore)

IN_REGISTERS, IN_TENSOR_MEMORY, ZERO = 0, 1, 2
"""Location of an accumulator; initially registers, uninitialized."""


class BlockPair:
    """The pair of blocks of a cluster, and the accumulators of their products.

    An accumulator is in tensor memory, or in registers, or all zero and nowhere: a variable of the program says which.
    """

    def __init__(self, cluster: ClusterStage, sharding: ClusterShards):
        self.cluster, self.sharding = cluster, sharding
        self._tensor: dict[ir.Var, ir.Buffer] = {}
        self._state: dict[ir.Var, ir.Buffer] = {}
        self._done = cluster.mbarrier("product_done", [1], remote=True)
        self._count = cluster.variable("products")
        for tile in dict.fromkeys(sharding.results):
            shape = [ROWS, *tile.shape[1:]]
            self._tensor[tile.data] = tir.local_buffer(f"{tile.name}_tensor", shape, str(tile.dtype), "shared.tmem")
            self._state[tile.data] = cluster.variable(f"{tile.name}_state")
            cluster.tiles.append(self._tensor[tile.data])

    def holds(self, region: ir.Call) -> bool:
        """Whether a region is of an accumulator."""
        return data_of(region) in self._tensor

    def filled(self, fill: Fill) -> list[ir.Stmt]:
        """After an accumulator's registers have been filled."""
        if not self.holds(fill.target):
            return []
        zero = getattr(fill.value, "value", None) == 0
        return [self.cluster.assign(self._state[data_of(fill.target)], ZERO if zero else IN_REGISTERS)]

    def product(self, product: Gemm, operands: list[ir.Call], clear: Any) -> list[ir.Stmt]:
        """C += A B by both blocks."""
        data = data_of(product.c)
        tensor, state = self._tensor[data], self._state[data]
        rows, columns = tensor.shape
        result = tir.region(tensor, [0, 0], [rows, columns], "rw")
        clear = ir.IntImm("bool", 1) if ir.constant(clear) else _is(state, ZERO)
        done, count = ir.BufferLoad(self._done, [0]), ir.BufferLoad(self._count, [0])
        return [
            ir.IfThenElse(_is(state, IN_REGISTERS), self._moved(data, into_registers=False), None),
            # The first block reads the operands of both, and both wait for it.
            self.cluster.barrier(),
            product.by_two_blocks(operands[0], operands[1], result, clear, done),
            mbarriers.wait(self._done, 0, count % 2),
            self.cluster.assign(self._count, count + 1),
            self.cluster.assign(state, IN_TENSOR_MEMORY),
        ]

    def around(self, stmt: ir.Stmt, lowered: list[ir.Stmt]) -> list[ir.Stmt]:
        """A statement's lowering, with accumulators that it names in registers."""
        before, after = [], []
        written = {data_of(r) for r in regions(stmt, written=True)} | stored(stmt)
        for data, state in self._state.items():
            names = {data} | {var for var, view in self.sharding.views.items() if view.base.data == data}
            if ir.contains(stmt, partial(_touches, names)):
                fetched = self._moved(data, into_registers=True)
                before.append(ir.IfThenElse(_is(state, IN_TENSOR_MEMORY), fetched, None))
            if names & written:
                after.append(self.cluster.assign(state, IN_REGISTERS))
        return [*before, *lowered, *after]

    def _moved(self, data: ir.Var, *, into_registers: bool) -> ir.Stmt:
        tensor, local = self._tensor[data], self.sharding.shards[data].local
        source, target = (tensor, local) if into_registers else (local, tensor)
        shape = list(tensor.shape)
        return tir.tile_call("copy", tir.region(source, [0, 0], shape, "r"), tir.region(target, [0, 0], shape, "w"))


def _touches(names: set[ir.Var], node: ir.Node) -> bool:
    return isinstance(node, ACCESS) and node.buffer.data in names


def _is(variable: ir.Buffer, value: int) -> ir.PrimExpr:
    return ir.EQ(ir.BufferLoad(variable, [0]), ir.IntImm("int32", value))
