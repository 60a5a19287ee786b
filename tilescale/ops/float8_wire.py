# SPDX-License-Identifier: MIT
"""Collectives that send numbers as float8: groups of 128 with a scale each, sums in float32.

One kernel quantizes, sends, sums and dequantizes, so that a tensor is read and written once. One or two persistent
blocks per SM process their tiles, one iteration after the other, so that the network and the memory are busy at the
same time; such a small grid synchronizes the ranks by itself. Local parts are quantized as well where other ranks
receive them: all ranks have the same bits.

Scales are powers of two, so scaling itself rounds nothing. A group with an infinity or a NaN becomes NaN as a whole.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import SUMS, check_tensor, dense
from tilescale.ops.group import size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of, join, plain, split
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.persistent import turns_of
from tilescale.ops.rounding import FRACTION, largest, power
from tilescale.ops.whole_tensors import compare_counts, spans_nodes
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.tile_cost import places_of

WIRE = "float8_e4m3fn"

GROUP = 128
"""Numbers that share a scale."""

THREADS = 512

TURNS = 4
"""Iterations of a block for each SM, from which on two blocks share one: they hide each other's latency. On two H200 an
all-gather of 64 MiB takes 76 us, by one block 85 us; of 16 MiB 29 and 27 us."""

SCALE_BYTES = 4

MAGNITUDE, LEAST = 0x7FFFFFFF, (127 - 117) << FRACTION
"""The bits of a float32 number without its sign; those of 2^-117, the least that the largest magnitude of a group is
taken to be: the scale and one over it are normal numbers."""

MOST = largest(WIRE)

END, NEXT = 448.0, 240.0
"""The largest number of float8, and the largest one below half the next power of two."""


def check_wire(wire: Any, a: torch.Tensor, group: str) -> None:
    """Raise ArgumentError unless numbers of `a` can be sent as float8 between the ranks of a group."""
    if wire != WIRE:
        raise ArgumentError(f"wire is {wire!r}", hint=f"supported: {WIRE!r}, or None for numbers as they are")
    check_tensor("a", a, served=SUMS)
    if spans_nodes(team_of(group)):
        raise ArgumentError(
            f"wire is {wire!r}, the group spans nodes", hint="leave wire out: it is for ranks of a node"
        )


@operator("all_gather_float8")
def all_gather_float8(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The gathered tensor."""
    team = team_of(group)
    shape = (team.size * a.shape[0], *a.shape[1:])
    return join(_whole(_exchanged("all_gather", a, 1, team), shape), dim, team.size)


@operator("reduce_scatter_float8")
def reduce_scatter_float8(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part of the sum."""
    team = team_of(group)
    made = _exchanged("reduce_scatter", split(a, dim, team.size), team.size, team)
    return _whole(made, [n // team.size if i == dim else n for i, n in enumerate(a.shape)])


@operator("all_reduce_float8")
def all_reduce_float8(a: torch.Tensor, group: str) -> torch.Tensor:
    """The sum."""
    team = team_of(group)
    missing = -a.numel() % (GROUP * team.size)
    flat = dense(a).view(-1)
    made = _exchanged("all_reduce", torch.nn.functional.pad(flat, (0, missing)) if missing else flat, team.size, team)
    return _whole(made.view(-1)[: a.numel()], a.shape)


def _exchanged(name: str, a: torch.Tensor, parts: int, team: Team) -> torch.Tensor:
    """(parts of the result, padded part) of a tensor of `parts` consecutive parts."""
    if team.size == 1:
        return a.reshape(1, -1).clone()
    compare_counts(a, team)
    part = a.numel() // parts
    rows = -(-part // GROUP)
    given = dense(a).view(parts, part)
    if part % GROUP:
        given = torch.nn.functional.pad(given, (0, rows * GROUP - part))
    made = a.new_empty(1 if name == "reduce_scatter" else team.size, rows * GROUP)
    if rows:
        sms = places_of(current_machine())
        resident = 2 if rows >= TURNS * sms * high_of(1) else 1
        exchange = kernel(program, team, sms, resident, name, dtype_of(a))
        exchange(given.view(parts, rows, GROUP), *_boxes(name, team, rows), made.view(-1, rows, GROUP))
    return made[:, :part]


def _boxes(name: str, team: Team, rows: int) -> list[torch.Tensor]:
    """Inboxes of parts and their scales, and of sums and theirs. One group where no sums arrive."""
    inbox, sums = ((1, 1) if name == without else (team.size, rows) for without in ("all_gather", "reduce_scatter"))
    shapes = [(*inbox, GROUP), (*inbox, SCALE_BYTES), (*sums, GROUP), (*sums, SCALE_BYTES)]
    kinds = (torch.float8_e4m3fn, torch.float32) * 2
    found = workspace_of(team).symmetric(torch.uint8, *shapes)
    return [
        x.view(kind).squeeze(-1) if kind == torch.float32 else x.view(kind)
        for x, kind in zip(found, kinds, strict=True)
    ]


def _whole(made: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result of parts, as a tensor of that shape."""
    return plain(made.reshape(shape))


def last_of(dtype: str) -> int:
    """The bits of 1.75 times a type's largest power of two.

    A larger magnitude, divided by its scale, may be rounded to the next power of two, which the type does not have.
    """
    most = torch.finfo(getattr(torch, dtype)).max
    return int(torch.tensor(1.75 * 2.0 ** math.floor(math.log2(most) - 1e-9)).view(torch.int32))


@T.macro
def quantize(x, sizes, top, scale, inverse, end, q, last):
    """q = x / scale, a scale for each row: the least power of two by which the largest magnitude fits the type; NaN for
    all of a row with an infinity or a NaN. A row with a magnitude above `last`, given by its bits, ends where q times
    the scale is still a number of the type of the result."""
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        sizes[i, j] = T.reinterpret(x[i, j], "int32") & MAGNITUDE
    T.reduce_max(sizes, top, dim=1)
    for i in T.Parallel(x.shape[0]):
        exponent = ((T.max(top[i], LEAST) - MOST) >> FRACTION) + 1
        scale[i] = power(exponent, top[i])
        inverse[i] = power(-exponent, top[i])
        end[i] = T.if_then_else(top[i] > last, NEXT, END)
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        q[i, j] = T.cast(T.max(T.min(x[i, j] * inverse[i], end[i]), -end[i]), WIRE)


@T.macro
def dequantize(q, scale, Y, part, first, rows):
    """A tile of a part of Y."""
    for i, j in T.Parallel(q.shape[0], q.shape[1]):
        if first + i < rows:
            Y[part, first + i, j] = T.cast(T.cast(q[i, j], "float32") * scale[i], Y.dtype)


@T.macro
def load(x, X, part, first, rows):
    """A tile of a part of X in float32; beyond the last row, of that."""
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        x[i, j] = T.cast(X[part, T.min(first + i, rows - 1), j], "float32")


@T.macro
def send(q, scale, box, scales, rank, first, flags, block, other):
    """A tile of groups and their scales to another rank, and then its signal."""
    T.copy(q, box[rank, first, 0], dst=other, impl="lsu")
    T.copy(scale, scales[rank, first], dst=other, impl="lsu")
    T.signal(flags[rank, block], dst=other)


def high_of(resident: int) -> int:
    """Groups of a tile: blocks on one SM share its registers."""
    return 128 // resident


def program(size: int, sms: int, resident: int, name: str, dtype: str) -> Any:
    """A collective of groups: "all_gather"; "reduce_scatter" or "all_reduce", of a part for each rank.

    In each iteration a block sends a tile of every other part to its rank, sums the tiles of the previous iteration and
    sends the sum to all ranks, and receives the sums of the iteration before that.
    """
    blocks, high = sms * resident, high_of(resident)
    rows, sums, sends = T.dynamic("rows"), name != "all_gather", name != "reduce_scatter"
    of_inbox, of_sums = (size, rows) if sums else (1, 1), (size, rows) if sends else (1, 1)
    last, late = last_of(dtype), sums + sends

    @T.prim_func
    def float8_collective(
        X: T.Tensor((size if sums else 1, rows, GROUP), dtype),
        inbox: T.Tensor((*of_inbox, GROUP), WIRE),  # by source
        inbox_scales: T.Tensor(of_inbox, "float32"),
        outbox: T.Tensor((*of_sums, GROUP), WIRE),  # by the rank that sums
        outbox_scales: T.Tensor(of_sums, "float32"),
        Y: T.Tensor((size if sends else 1, rows, GROUP), dtype),
    ):
        with T.Kernel(device=size, block=blocks, threads=THREADS) as block:
            arrived, summed = T.alloc_flags((size, blocks)), T.alloc_flags((size, blocks))
            T.assume(rows >= 1)
            T.annotate_min_blocks_per_sm(resident)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                x, total = (T.alloc((high, GROUP), "float32", level="l0") for _ in range(2))
                sizes, q = T.alloc((high, GROUP), "int32", level="l0"), T.alloc((high, GROUP), WIRE, level="l0")
                top = T.alloc((high,), "int32", level="l0")
                scale, inverse, end = (T.alloc((high,), "float32", level="l0") for _ in range(3))
                turns = turns_of(block, blocks, T.ceildiv(rows, high))
                for turn in T.serial(turns + late):
                    if sums:
                        if turn < turns:
                            first = (block + turn * blocks) * high
                            for step in T.serial(1, size):
                                owner = (rank + step) % size
                                load(x, X, owner, first, rows)
                                quantize(x, sizes, top, scale, inverse, end, q, last)
                                send(q, scale, inbox, inbox_scales, rank, first, arrived, block, owner)
                    summing = turn - 1 if sums else turn
                    if (summing >= 0) & (summing < turns):
                        first = (block + summing * blocks) * high
                        if sums:
                            T.clear(total)
                            for source in T.serial(size):
                                if source == rank:
                                    load(x, X, rank, first, rows)
                                else:
                                    T.wait(arrived[source, block], ">=", summing + 1)
                                    for i, j in T.Parallel(high, GROUP):
                                        row = T.min(first + i, rows - 1)
                                        x[i, j] = T.cast(inbox[source, row, j], "float32") * inbox_scales[source, row]
                                for i, j in T.Parallel(high, GROUP):
                                    total[i, j] += x[i, j]
                        else:
                            load(total, X, 0, first, rows)
                        if sends:
                            for i, j in T.Parallel(high, GROUP):  # a sum that overflows is an infinity
                                total[i, j] = T.cast(T.cast(total[i, j], dtype), "float32")
                            quantize(total, sizes, top, scale, inverse, end, q, last)
                            for step in T.serial(1, size):
                                other = (rank + step) % size
                                send(q, scale, outbox, outbox_scales, rank, first, summed, block, other)
                            dequantize(q, scale, Y, rank, first, rows)
                        else:
                            for i, j in T.Parallel(high, GROUP):
                                if first + i < rows:
                                    Y[0, first + i, j] = T.cast(total[i, j], dtype)
                    if sends:
                        taken = turn - late
                        if taken >= 0:
                            first = (block + taken * blocks) * high
                            for step in T.serial(1, size):
                                source = (rank + step) % size
                                T.wait(summed[source, block], ">=", taken + 1)
                                T.copy(outbox[source, first, 0], q)
                                T.copy(outbox_scales[source, first], scale)
                                dequantize(q, scale, Y, source, first, rows)

    return float8_collective


@all_gather_float8.register_fake
def _(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return a.new_empty([n * size_of(group) if i == dim else n for i, n in enumerate(a.shape)])


@reduce_scatter_float8.register_fake
def _(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return a.new_empty([n // size_of(group) if i == dim else n for i, n in enumerate(a.shape)])


@all_reduce_float8.register_fake
def _(a: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.given = inputs


all_gather_float8.register_autograd(
    lambda ctx, grad: (operator_of("reduce_scatter")(grad, *ctx.given), None, None), setup_context=_setup
)
reduce_scatter_float8.register_autograd(
    lambda ctx, grad: (operator_of("all_gather")(grad, *ctx.given), None, None), setup_context=_setup
)
all_reduce_float8.register_autograd(
    lambda ctx, grad: (operator_of("all_reduce")(grad, "sum", *ctx.given), None), setup_context=_setup
)
