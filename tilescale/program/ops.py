# SPDX-License-Identifier: MIT
"""The operations and markers that TileScale adds to TileLang's IR. Every one is declared here, once.

Tile arguments are TileLang regions (`tl.region`). Attributes are annotations of the call:

    level   the level whose units an operation speaks of
    far     which side of a copy is remote: "src" or "dst"
    impl    the implementation the user asked for
    op      a combining operation: "sum" | "max" | "min" | "prod"; for signals "add" | "set"
    dim     the dimension that is split or joined
    after   how a copy that the device's queue makes compares a flag before it starts
    chunk   rows of a part for each flag that an asynchronous collective raises
    order   the memory order of an atomic operation
    slots   whether the tensors of an asynchronous all-to-all have a dimension for the ranks, in front of the rows

`operations.py` reads calls of them.
"""

from __future__ import annotations

from tilelang_core.trace import register_op

SCALE = "tilescale.scale"
"""AttrStmt key: the statements inside run once on every unit of the level that is the value."""

OWNER = "tilescale.owner"
"""Launch annotation: data variable of a buffer -> level whose units own one instance each."""

EXTENT = "tilescale.extent."
"""Launch annotation prefix: extent of a level above the program, e.g. `tilescale.extent.device`."""

FLAGS = "tilescale.flags"
"""Launch annotation: data variable of a buffer of flags that are zero when a call begins -> 1."""

IN_ORDER = "tilescale.in_order"
"""Launch annotation: programs rely on starting in the order of their numbers."""

TASKS = "tilescale.tasks"
"""Launch annotation: signals and waits order tasks of one device, and nothing relies on the order of collectives."""

AHEAD = "tilescale.ahead"
"""Launch annotation: data variable of a tensor of which bulk copies read nothing that the launch has written -> 1."""

BUILDER = "tilescale.builder"
"""Attribute of a function: the name of the `ProgramBuilder` that traced it."""

MACHINE = "tilescale.machine"
"""Launch annotation: digest of the machine that the program was traced for."""

MOMENTS = "tilescale.moments"
"""Attribute of a function whose waits and signals record when they begin and end: how many of them a block keeps."""

MOST_MOMENTS = 256
"""Moments that a block keeps where a timeline is wanted."""

RANK = register_op("tilescale.rank", pure=True)
"""rank(level) -> int32: which of its siblings the executing unit (or the unit around it) is."""
VIEW = register_op("tilescale.view")
"""view(region, *shape; level, dim?, block?) -> handle: the part of a tile that one unit of `level` holds, and its
shape. No dim: a replica."""
COPY = register_op("tilescale.copy")
"""copy(src, dst, peer[, flag, value[, after_flag, after_value]]; level, far, impl?, op?, after?): a tile from or to
`peer`; then the flag there. With `after`, a comparison, it starts when the flag of this device holds."""
SIGNAL = register_op("tilescale.signal")
"""signal(flag, value[, peer]; level, op): publish everything this unit wrote, then update the flag."""
WAIT = register_op("tilescale.wait")
"""wait(flags, value[, index]; compare): block until all of the flags compare true, or with `index`, a variable, any of
them, whose number it gets; acquires what their signallers published."""
ATOMIC_ADD = register_op("tilescale.atomic_add")
"""atomic_add(target, value, peer[, previous]; level, order, impl?): add a number, or a tile, to the target at `peer`;
`previous` is a variable that gets what an element held."""
INVOKE_ONE = register_op("tilescale.invoke_one")
"""invoke_one(value[, result]): one thread of the unit evaluates it; `result` is a variable of all its threads."""
BARRIER = register_op("tilescale.barrier")
"""barrier(; level): all units of the level arrive before any leaves."""
ALLREDUCE = register_op("tilescale.allreduce")
"""allreduce(x[, out]; level, op, impl?, wire?): combine over the units of the level, in place or into `out`. Or
allreduce(x, ..., combine; level, impl?), in place. Or allreduce(x, out, weight, ...; level, op, norm, eps, offset,
scaling?, power?, centered?): the residual is added to out, and further tiles get the norm of its rows; `norm` has the
names of the tiles from the weight on (norm.py)."""
COMBINE = register_op("tilescale.combine", pure=True)
"""combine(a..., b..., result...): a traced combining function: its 2n variables and its n results."""
REDUCE_SCATTER = register_op("tilescale.reduce_scatter")
"""reduce_scatter(src, dst; level, op, dim, impl?, wire?): dst is this unit's share of the combination of all src."""
ALL_GATHER = register_op("tilescale.all_gather")
"""all_gather(src[, dst[, flags]]; level, dim, impl?, chunk?, wire?): dst is all units' src joined along dim. With
`flags`, a tensor (size, chunks), it is asynchronous: [r, c] is raised by 1 when chunk c of rank r's part is there."""
ALL_TO_ALL = register_op("tilescale.all_to_all")
"""all_to_all(src, dst[, flags]; level, dim, impl?, chunk?, slots?): part j of src goes to unit j and becomes part `my
rank` there. With `flags` it is asynchronous, as an all-gather."""
ALL_TO_ALL_V = register_op("tilescale.all_to_all_v")
"""all_to_all_v(src, dst, sent[, received]; level, impl?): the first sent[0] rows of src go to unit 0, the next sent[1]
to unit 1; received rows are in dst in the order of ranks, and received[r] is the number of rows from rank r. `sent` is
a tensor, or `counts`."""
COUNTS = register_op("tilescale.counts", pure=True)
"""counts(n, ...): how many rows go from each rank to each, that of rank 0 to rank 1 second."""
BROADCAST = register_op("tilescale.broadcast")
"""broadcast(x, root; level, impl?): x of the root on every unit."""

COLLECTIVES = frozenset(
    op.name for op in (BARRIER, ALLREDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, ALL_TO_ALL_V, BROADCAST)
)
"""Operations that all units of their level must reach together."""

ALL_OPS = COLLECTIVES | {op.name for op in (RANK, VIEW, COPY, SIGNAL, WAIT, ATOMIC_ADD, INVOKE_ONE)}

REDUCTIONS = ("sum", "max", "min", "prod")
COMPARISONS = ("==", "!=", ">=", ">", "<=", "<")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
