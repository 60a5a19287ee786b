# SPDX-License-Identifier: MIT
"""Give a unit its part of a statement that the whole program makes on tiles which units hold.

Why: see distribution.py. Before: a tile operation or a parallel nest on tiles held as copies or shares. After: for each
unit the same statement on its own fragments: loops and regions cut to its share, a reduction along the split dimension
finished through shared memory. What reads copies and writes memory runs on one unit.

Declines tile operations that a share says nothing about, such as a product over a split inner dimension.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.combine import COMBINE
from tilescale.backends.tilelang.lowering.groups import slots
from tilescale.backends.tilelang.lowering.groups.clones import KIND
from tilescale.backends.tilelang.lowering.groups.distribution import (
    ELEMENTWISE,
    TileDistribution,
    accesses,
    matching_axis,
    parallel_loops,
)
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads
from tilescale.backends.tilelang.lowering.registry import lowers, rule_for

_PARTIAL = {"sum": "sum", "abssum": "sum", "max": "max", "absmax": "max", "min": "min"}
"""Reductions that can be finished from partial results, and how those combine."""


class UnitStatements:
    """One unit's part of the program's statements."""

    def __init__(self, stage: GroupStage, unit: UnitThreads):
        self.stage, self.unit = stage, unit

    def stmt(self, stmt: ir.Stmt, held: TileDistribution) -> ir.Stmt | None:
        """The unit's part; None if it has none."""
        rank = self.unit.rank(held.level.name)
        if held.axis is None and self._is_half_stored(stmt):
            return tir.at(self._stored_half(stmt.value), stmt)
        if held.axis is None:
            written = [b for b, _, writes in accesses(stmt) if writes]
            if rank and not any(b.data in self.stage.distributions.held for b in written):
                return None
            return self._on_own(stmt, first=rank == 0)
        if isinstance(stmt, ir.Evaluate):
            name = ir.op_name(stmt.value) or ""
            rule = rule_for(name, KIND)
            if rule is None:
                tile = next(b for b, _, _ in accesses(stmt) if self._split(b) is not None)
                raise self.stage.unsupported(f"{name.rpartition('.')[2]} of {tile.name!r}, which is held {held}")
            return tir.at(rule(self, stmt.value), stmt)
        return self._nest(stmt, held)

    def _is_half_stored(self, stmt: ir.Stmt) -> bool:
        """Whether a statement copies a sum to memory of which a unit has its half (results.py)."""
        if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
            return False
        copy = tiles.TileCopy.of(stmt.value)
        source, target = (ir.region_parts(region)[0] for region in (copy.source, copy.target))
        return source.data in self.stage.stored and target.scope() == "global"

    def _stored_half(self, call: ir.Call) -> ir.Stmt:
        copy, regions = tiles.TileCopy.of(call), []
        for region, access in ((copy.source, "r"), (copy.target, "w")):
            buffer, begins, extents = ir.region_parts(region)
            extents[-1] = ir.integer(extents[-1]) // 2
            begins[-1] = begins[-1] + self.unit.number * extents[-1]
            own = self.stage.copy_of(buffer, self.unit) if access == "r" else buffer
            regions.append(tir.region(own, begins, extents, access))
        return copy.between(*regions)

    # -- places ------------------------------------------------------------------------------------------------------

    def _split(self, buffer: ir.Buffer) -> TileDistribution | None:
        held = self.stage.distributions.of(buffer)
        return held if held is not None and held.axis is not None else None

    def _begin(self, held: TileDistribution, extent: int) -> int:
        return self.unit.rank(held.level.name) * (extent // held.count)

    def _local(self, held: TileDistribution, buffer: ir.Buffer, indices: list[Any]) -> list[Any]:
        """Indices of the whole tile as indices of the unit's share."""
        if held.axis is None:
            return indices
        index = indices[held.axis]
        if held.cyclic:
            at = ir.simplify((index - self.unit.rank(held.level.name)) // held.count, {})
        else:
            at = ir.simplify(index - self._begin(held, ir.integer(buffer.shape[held.axis])), {})
        return [at if axis == held.axis else i for axis, i in enumerate(indices)]

    def _on_own(self, stmt: ir.Stmt, *, first: bool = True) -> ir.Stmt:
        """The statement on the unit's own tiles; only the first unit writes what all see."""

        def leave(node: ir.Node) -> Any:
            if not isinstance(node, ir.BufferLoad | ir.BufferStore):
                return None
            held = self.stage.distributions.of(node.buffer)
            if held is None:
                drop = isinstance(node, ir.BufferStore) and not first and not node.buffer.scope().startswith("local")
                return tir.sequence([]) if drop else None
            own = self.stage.copy_of(node.buffer, self.unit)
            indices = self._local(held, node.buffer, list(node.indices))
            if isinstance(node, ir.BufferLoad):
                return ir.BufferLoad(own, indices)
            return ir.BufferStore(own, node.value, indices)

        return tir.rewrite(stmt, leave=leave)

    def _nest(self, stmt: ir.Stmt, held: TileDistribution) -> ir.Stmt:
        loops = parallel_loops(stmt)
        var = self.stage.distributions.split_loop(stmt)
        assert var is not None
        body = loops[-1].body
        for buffer, indices, writes in accesses(body):
            mine = self.stage.distributions.of(buffer)
            whole = mine is not None and mine.axis is None
            if writes and whole and any(var in ir.variables(i) for i in indices):
                raise self.stage.unsupported(f"a share of {buffer.name!r} is written where it is held {mine}")
        extent = next(ir.integer(loop.extent) for loop in loops if loop.loop_var.same_as(var))
        rank, share = self.unit.rank(held.level.name), extent // held.count
        position = var * held.count + rank if held.cyclic else var + rank * share
        body = self._on_own(ir.substitute(body, {var: position}))
        for loop in reversed(loops):
            length = share if loop.loop_var.same_as(var) else loop.extent
            body = tir.relooped(loop, extent=ir.int_node(length), body=body)
        return body

    # -- regions -----------------------------------------------------------------------------------------------------

    def _cut(self, region: ir.Call, axis: int | None, held: TileDistribution) -> ir.Call:
        """The unit's share of a region along one of its dimensions; all of it without."""
        buffer, begins, extents = ir.region_parts(region)
        if axis is not None:
            extent = ir.integer(extents[axis])
            begins[axis] = begins[axis] + self._begin(held, extent)
            extents[axis] = ir.int_node(extent // held.count)
        mine = self.stage.distributions.of(buffer)
        if mine is not None:
            begins = self._local(mine, buffer, begins)
            buffer = self.stage.copy_of(buffer, self.unit)
        return tir.region(buffer, begins, extents, tiles.access_of(region))

    def _whole(self, region: ir.Call) -> int:
        """The split dimension of a region of a held tile, of which the region has all."""
        buffer, begins, extents = ir.region_parts(region)
        held = self._split(buffer)
        assert held is not None and held.axis is not None
        covers = ir.constant(begins[held.axis]) == 0 and ir.constant(extents[held.axis]) == ir.constant(
            buffer.shape[held.axis]
        )
        if not covers:
            raise self.stage.unsupported(f"a part, along its split dimension, of {buffer.name!r}, held {held}")
        return held.axis

    def _copy(self, call: ir.Call) -> ir.Stmt:
        """Regions cut alike; if only shares go into a copy, the copies are made whole through shared memory."""
        copy = tiles.TileCopy.of(call)
        source, target = copy.source, copy.target
        (a, _, extents), (b, _, others) = ir.region_parts(source), ir.region_parts(target)
        held = self._split(a) or self._split(b)
        assert held is not None and held.axis is not None
        if held.cyclic:
            return self._nest(tir.copy_nest(call), held)
        axes: list[int | None]
        if self._split(a) is not None:
            axes = [self._whole(source), matching_axis(held.axis, extents, others)]
        else:
            axes = [matching_axis(held.axis, others, extents), self._whole(target)]
        both = self._split(a), self._split(b)
        cuts = [axis for axis in axes if axis is not None]
        if len(cuts) < len(axes) or any(
            h is not None and (h.axis, h.cyclic) != (x, False) for h, x in zip(both, cuts, strict=True)
        ):
            raise self.stage.unsupported(f"a copy between {a.name!r} and {b.name!r}, which is held {held} in one")
        into = self.stage.distributions.of(b)
        if into is not None and into.axis is None:
            return self._gathered(self._cut(source, cuts[0], held), cuts[0], held, target)
        return copy.between(self._cut(source, cuts[0], held), self._cut(target, cuts[1], held))

    def _gathered(self, part: ir.Call, axis: int, held: TileDistribution, target: ir.Call) -> ir.Stmt:
        buffer, begins, extents = ir.region_parts(target)
        return slots.gather(
            self.stage, self.unit, part, axis, tir.region(self.stage.copy_of(buffer, self.unit), begins, extents, "w")
        )

    def _fill(self, call: ir.Call) -> ir.Stmt:
        fill = tiles.Fill.of(call)
        filled, begins, extents = ir.region_parts(fill.target)
        axis, held = self._whole(fill.target), self._split(filled)
        assert held is not None
        buffer = self.stage.copy_of(filled, self.unit)
        extents[axis] = ir.int_node(ir.integer(extents[axis]) // held.count)
        return fill.on(tir.region(buffer, begins, extents, "w"))

    def _reduce(self, call: ir.Call) -> ir.Stmt:
        """Along another dimension each unit has its results; along the split one partial results, which all combine."""
        made = tiles.Reduce.of(call)
        source, target = (ir.region_parts(r)[0] for r in (made.source, made.target))
        mine, result, dim = self._split(source), self.stage.distributions.of(target), made.dim
        if mine is None or (mine.axis == dim) != (result is None or result.axis is None):
            raise self.stage.unsupported(
                f"a reduction of {source.name!r}, held {mine}, along dimension {dim} into {target.name!r}"
            )
        shares = [self._share(r) for r in (made.source, made.target)]
        if mine.axis != dim:
            return made.between(*shares)
        if made.kind not in _PARTIAL:
            raise self.stage.unsupported(f"a {made.kind} reduction along the split dimension of {source.name!r}")
        return self._combined(made, shares, _PARTIAL[made.kind])

    def _share(self, region: ir.Call) -> ir.Call:
        """All of the unit's own part of a region's tile."""
        buffer, begins, _ = ir.region_parts(region)
        held = self.stage.distributions.of(buffer)
        if held is None:
            return region
        if held.axis is not None:
            self._whole(region)
        own = self.stage.copy_of(buffer, self.unit)
        _, _, extents = ir.region_parts(region)
        if held.axis is not None:
            extents[held.axis] = own.shape[held.axis]
        return tir.region(own, begins, extents, tiles.access_of(region))

    def _combined(self, made: tiles.Reduce, shares: list[ir.Call], op: str) -> ir.Stmt:
        target, begins, extents = ir.region_parts(shares[1])
        shape = [ir.integer(n) for n in extents]
        key = ("partial", target.data)
        partial = self.stage.make(key, f"{target.name}_partial", shape, str(target.dtype), target.scope())
        whole = tir.region(partial, [0] * len(shape), shape, "w")
        first = made.cleared(shares[0], whole)
        loops = tir.loop_variables(shape)
        at = [b + i for b, i in zip(begins, loops, strict=True)]
        old = None if made.clear else ir.BufferLoad(target, at)

        def finish(received: list[Any]) -> ir.Stmt:
            total = old
            for value in received:
                total = value if total is None else COMBINE[op](total, value)
            return tir.parallel(loops, shape, ir.BufferStore(target, total, at))

        return tir.sequence([first, slots.exchange(self.stage, self.unit, whole, loops, finish)])

    def _gemm(self, call: ir.Call) -> ir.Stmt:
        """Rows or columns of the product: the operand that has them is cut alike, the other one is whole."""
        product = tiles.Gemm.of(call)
        a, b, c = product.operands
        buffer_c = ir.region_parts(c)[0]
        held, rank = self._split(buffer_c), len(buffer_c.shape)
        if held is None or held.cyclic:
            raise self.stage.unsupported(f"a product into {buffer_c.name!r} of a fragment that units split")
        by_row = held.axis == rank - 2
        transposed = product.transpose_a if by_row else product.transpose_b
        operand = a if by_row else b
        axis = len(ir.region_parts(operand)[0].shape) - (1 if transposed == by_row else 2)
        for region, allowed in ((a, axis if by_row else None), (b, None if by_row else axis)):
            mine = self.stage.distributions.of(ir.region_parts(region)[0])
            if mine is not None and mine.axis != allowed:
                name = ir.region_parts(region)[0].name
                raise self.stage.unsupported(f"a product with {name!r}, held {mine}, into one held {held}")
        cut = self._cut(operand, axis, held)
        regions = [cut, self._share(b)] if by_row else [self._share(a), cut]
        m, n, k = product.sizes
        sizes = (ir.integer(m) // held.count, n, k) if by_row else (m, ir.integer(n) // held.count, k)
        return product.on((*regions, self._share(c)), sizes)


for _name in ELEMENTWISE:
    lowers(_name, KIND)(UnitStatements._copy)
lowers(tl.FILL, KIND)(UnitStatements._fill)
lowers(tl.REDUCE, KIND)(UnitStatements._reduce)
lowers(tl.GEMM, KIND)(UnitStatements._gemm)
