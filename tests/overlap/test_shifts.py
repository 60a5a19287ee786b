# SPDX-License-Identifier: MIT
"""Loops over a ring: a part is forwarded while the grid works on it, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.overlap import ring_attention
from tests.overlap.support import H200, check_leaves, check_same, copies, line, overlapped
from tilelang_core import ir
from tilescale.passes.overlap.rewrite import overlap

WIDE = 8


def around(
    devices: int,
    rows: int,
    tile: int,
    *,
    by: int = 1,
    both: bool = False,
    back: bool = False,
    guarded: bool = False,
    shift_first: bool = False,
    barrier: bool = False,
    grids: int = 1,
) -> Any:
    """Pass shares around the devices; each device stores all of them in the order of arrival.

    Args:
        by: distance of the neighbour.
        both: whether the sum of two tensors is stored, one of which goes the other way.
        back: whether a share arrives in a separate buffer, from where it is copied, instead of in every second slot.
        guarded: whether no device sends in the last iteration.
        shift_first: whether an iteration begins with the shift, and the local share is stored last.
        barrier: whether there is a barrier before the copies, too.
        grids: number of grids of an iteration that store.
    """

    @T.macro
    def shift(one, two, here, there):
        """Send on what is here, and synchronize when it has arrived."""
        if barrier:
            T.barrier()
        T.copy(one[here, 0:rows, 0:WIDE], one[there, 0:rows, 0:WIDE], dst=(T.rank("device") + by) % devices)
        if both:
            peer = (T.rank("device") + by * (devices - 1)) % devices
            T.copy(two[here, 0:rows, 0:WIDE], two[there, 0:rows, 0:WIDE], dst=peer)
        T.barrier()
        if back:
            T.copy(one[1, 0:rows, 0:WIDE], one[0, 0:rows, 0:WIDE])
            if both:
                T.copy(two[1, 0:rows, 0:WIDE], two[0, 0:rows, 0:WIDE])
            T.barrier()

    @T.prim_func
    def f(X: T.Tensor((devices * rows, WIDE), "float32"), Y: T.Tensor((grids, devices, rows, WIDE), "float32")):
        with T.Kernel(device=devices, block=-(-rows // tile), threads=32) as b:
            one = T.alloc((2, rows, WIDE), "float32", level="l2")
            two = T.alloc((2, rows, WIDE), "float32", level="l2")
            with T.Scale("device"):
                X_dev = T.view(X, layout=T.FullRow)
                T.copy(X_dev, one[0, 0:rows, 0:WIDE])
                T.copy(X_dev, two[0, 0:rows, 0:WIDE])
                T.barrier()
            for step in T.serial(devices):
                here = 0 if back else step % 2
                there = 1 if back else (step + 1) % 2
                now = there if shift_first and not back else here
                if shift_first:
                    with T.Scale("device"):
                        shift(one, two, here, there)
                for number in range(grids):
                    with T.Scale("device"), T.Scale("block"):
                        x = T.alloc((tile, WIDE), "float32", level="l1")
                        y = T.alloc((tile, WIDE), "float32", level="l1")
                        T.copy(one[now, b * tile, 0], x)
                        T.copy(two[now if both else 0, b * tile, 0], y)
                        for i, j in T.Parallel(tile, WIDE):
                            x[i, j] = x[i, j] * (number + 1) + y[i, j]
                        T.copy(x, Y[number, step, b * tile, 0])
                if not shift_first:
                    with T.Scale("device"):
                        if not guarded or step + 1 < devices:
                            shift(one, two, here, there)

    return f


def arguments(func: Any, devices: int) -> list[list[torch.Tensor]]:
    """A share of X and a poisoned Y for each device."""
    x, y = (tuple(int(n) for n in buffer.shape) for _, buffer in ir.parameters(func))
    shares = torch.randn(x, generator=torch.Generator().manual_seed(0)).chunk(devices)
    return [[share.contiguous(), torch.full(y, torch.nan)] for share in shares]


def test_it_is_started_before_the_grid_and_awaited_where_it_stood():
    changed, schedule = overlapped(around(4, 8, 4, guarded=True))
    (move,) = schedule.moves
    assert move.overlapped and move.tensors == ("one", "one")
    assert "overlapped: the grid accesses no arriving rows" in str(schedule)
    text = tilescale.compile(changed, machine=H200).python
    start, grid, wait = (
        text.index(w) for w in ("signal=one_here[0, step]", 'T.Scale("block")', "T.wait(one_here")
    )
    assert text.index("for step") < start < grid < wait < text.index("T.barrier()", wait)


def test_a_loop_that_begins_with_the_shift_is_turned():
    changed, schedule = overlapped(around(4, 8, 4, shift_first=True))
    assert schedule.moves[0].overlapped
    text = tilescale.compile(changed, machine=H200).python
    first, loop, later = (text.index(w) for w in ("T.wait(one_first[0]", "for step", "if step + 1 < 4"))
    assert first < loop < later


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 8),
    rows=st.integers(1, 6),
    tile=st.sampled_from((2, 3, 4)),
    by=st.integers(1, 3),
    both=st.booleans(),
    back=st.booleans(),
    guarded=st.booleans(),
    shift_first=st.booleans(),
    barrier=st.booleans(),
    grids=st.integers(1, 2),
)
def test_results_are_the_same(devices: int, rows: int, tile: int, grids: int, **shape: Any):
    func = around(devices, rows, tile, grids=grids, **shape)
    changed, schedule = overlapped(func)
    assert schedule.moves[0].overlapped, str(schedule)
    check_same(func, changed, arguments(func, devices), seeds=(None, 1))


Y_SHAPE = (4, 8, WIDE)


def ring(wrong: str = "") -> Any:
    """A ring of four devices with one thing wrong."""

    @T.prim_func
    def f(X: T.Tensor((32, WIDE), "float32"), Y: T.Tensor(Y_SHAPE, "float32")):
        with T.Kernel(device=4, block=2, threads=32) as b:
            one = T.alloc((2, 8, WIDE), "float32", level="l2")
            flags = T.alloc_flags((1,))
            with T.Scale("device"):
                T.copy(T.view(X, layout=T.FullRow), one[0, 0:8, 0:WIDE])
                T.barrier()
            for step in T.serial(4):
                with T.Scale("block"):
                    x = T.alloc((4, WIDE), "float32", level="l1")
                    T.copy(one[step % 2, b * 4, 0], x)
                    T.copy(x, Y[step, b * 4, 0])
                    if wrong == "written":
                        T.copy(x, one[step % 2, b * 4, 0])
                    if wrong == "touched":
                        T.copy(one[T.min(step, 2) % 2, b * 4, 0], x)
                    if wrong == "ordered":
                        T.signal(flags[0])
                with T.Scale("device") as (rank, size):
                    if wrong == "statement":
                        T.clear(one[(step + 1) % 2, 0:8, 0:WIDE])
                    peer = 0 if wrong == "one" else (rank + 1) % size
                    if wrong != "some" or rank > 0:
                        T.copy(one[step % 2, 0:8, 0:WIDE], one[(step + 1) % 2, 0:8, 0:WIDE], dst=peer)
                    if wrong != "barrier":
                        T.barrier()

    return f


@pytest.mark.parametrize(
    ("wrong", "reason", "culprit"),
    [
        ("written", "the grid accesses its tensors, where step is 0", "T.copy(x, one[step % 2"),
        ("touched", "the grid accesses its tensors, where step is 3", "T.copy(one[T.min("),
        ("ordered", "programs of the grid order units", "T.signal(flags[0])"),
        ("statement", "other statements precede it in its phase", ""),
        ("one", "some units are sent nothing, or several parts", ""),
        ("some", "other statements precede it in its phase", ""),
        ("barrier", "no barrier follows it, so no unit knows when it has arrived", ""),
    ],
)
def test_what_cannot_be_proven_stays_in_order(wrong: str, reason: str, culprit: str):
    changed, schedule = overlapped(ring(wrong))
    place = f" (line {line(ring, culprit)})" if culprit else ""
    assert f"sequential: {reason}{place}" in str(schedule)
    assert "signal=" not in tilescale.compile(changed, machine=H200).python


def test_a_ring_alone_is_overlapped():
    assert overlapped(ring())[1].moves[0].overlapped


@pytest.mark.parametrize("size", [256, 4096])
def test_a_shift_pays_beside_large_grids(size: int):
    """A ring of a GEMM: by the estimate only large parts take longer than the start of a queue operation."""
    (move,) = overlap(ring_product(size), H200)[1].moves
    assert move.overlapped == (size > 256) == (move.overlapped_s < move.in_order_s)


def ring_product(size: int, devices: int = 4) -> Any:
    """C = A B, whose rows of A go round the devices."""
    rows = size // devices

    @T.prim_func
    def f(
        A: T.Tensor((size, size), "bfloat16"),
        B: T.Tensor((size, size), "bfloat16"),
        C: T.Tensor((devices, rows, size), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=(size // 256, -(-rows // 128)), threads=256) as (bx, by):
            part = T.alloc((2, rows, size), "bfloat16", level="l2")
            with T.Scale("device"):
                T.copy(T.view(A, layout=T.FullRow), part[0, 0:rows, 0:size])
                T.barrier()
            for step in T.serial(devices):
                with T.Scale("block"):
                    a = T.alloc((128, 64), "bfloat16", level="l1")
                    b = T.alloc((64, 256), "bfloat16", level="l1")
                    c = T.alloc((128, 256), "float32", level="l0")
                    T.clear(c)
                    for k in T.Pipelined(size // 64, num_stages=3):
                        T.copy(part[step % 2, by * 128, k * 64], a)
                        T.copy(B[k * 64, bx * 256], b)
                        T.gemm(a, b, c)
                    T.copy(c, C[(T.rank("device") + devices - step) % devices, by * 128, bx * 256])
                with T.Scale("device") as (rank, _):
                    T.copy(
                        part[step % 2, 0:rows, 0:size], part[(step + 1) % 2, 0:rows, 0:size], dst=(rank + 1) % devices
                    )
                    T.barrier()

    return f


# -- attention ---------------------------------------------------------------------------------------------------------


def test_ring_attention_in_phases_goes_on_while_shares_travel():
    devices, heads, rows, dim = 3, 1, 32, 16
    program = ring_attention.in_phases(devices, heads, devices * rows, dim, tile=16, threads=32)
    changed, schedule = overlapped(program)
    assert schedule.moves[0].overlapped
    rng = torch.Generator().manual_seed(0)
    q, *kv = (torch.randn(heads, devices * rows, dim, generator=rng).half() for _ in range(3))
    shares = zip(q.chunk(devices, 1), torch.stack(kv).chunk(devices, 2), strict=True)
    args = [[a.contiguous(), b.contiguous(), torch.full((heads, rows, dim), torch.nan)] for a, b in shares]
    left = copies(args)
    tilescale.emulate(program, left, machine=H200, time=False)
    check_leaves(changed, args, left, seeds=(1,))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, *kv)))
    torch.testing.assert_close(torch.cat([out for *_, out in left], 1).double(), want, rtol=0, atol=2e-3)


def test_ring_attention_of_long_sequences_is_overlapped_by_default():
    program = ring_attention.in_phases(4, 8, 8192, 128, tile=128, threads=256)
    (move,) = tilescale.compile(program, machine=H200).moves.moves
    assert move.overlapped and move.overlapped_s < 0.9 * move.in_order_s
