# SPDX-License-Identifier: MIT
"""GEMMs of experts overlapped with the collectives around them: rows of several dimensions, and rows selected by a
tensor.
"""

# No postponed annotations here: TileLang evaluates those of a traced function where its closure is not known.

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.ladder import NUMBERED, load
from tests.overlap.support import H200, Tensors, check_same, line, overlapped
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError
from tilescale.program.ops import WAIT

WIDE = 4


def with_capacity(
    devices: int,
    experts: int,
    capacity: int,
    tile: int,
    *,
    slots: bool = True,
    gathers: bool = False,
    guard: str = "",
    back: str = "",
) -> Any:
    """Receive rows of experts, scale them by the expert's number, and send them back or add them up.

    Args:
        slots: whether the devices are a separate dimension, in front of the experts.
        gathers: whether each device gets the rows of all; otherwise experts are split over the devices.
        guard: use of the numbers of rows in N: trip count of a "loop", or condition of a "branch".
        back: the following collective, if any.
    """
    tiles, each = -(-capacity // tile), (experts, capacity, WIDE)
    one, every = ((1, *each), (devices, *each)) if slots else (each, (devices * experts, *each[1:]))

    @T.macro
    def scaled(source, target, place, row):
        x = T.alloc((tile, WIDE), "float32", level="l1")
        if slots:
            T.copy(source[place // experts, place % experts, row, 0], x)
        else:
            T.copy(source[place, row, 0], x)
        for i, j in T.Parallel(tile, WIDE):
            x[i, j] = x[i, j] * (place % experts + 2)
        if slots:
            T.copy(x, target[place // experts, place % experts, row, 0])
        else:
            T.copy(x, target[place, row, 0])

    @T.macro
    def grid(source, target, N, place, turn):
        if guard == "loop":
            for row in T.serial(T.ceildiv(N[place], tile)):
                scaled(source, target, place, row * tile)
        elif guard == "branch":
            if turn * tile < N[place]:
                scaled(source, target, place, turn * tile)
        else:
            scaled(source, target, place, turn * tile)

    @T.prim_func
    def f(
        X: T.Tensor(one if gathers else every, "float32"),
        N: T.Tensor((devices * experts,), "int32"),
        Y: T.Tensor(one if back == "reduce_scatter" else every, "float32"),
    ):
        with T.Kernel(device=devices, block=(1 if guard == "loop" else tiles, devices * experts), threads=32) as (b, p):
            come = T.alloc(every, "float32", level="l2")
            made = T.alloc(every, "float32", level="l2")
            with T.Scale("device"):
                T.clear(made)
                if gathers:
                    T.all_gather(X, come)
                else:
                    T.all_to_all(X, come)
            with T.Scale("block"):
                grid(come, made if back != "" else Y, N, p, b)
            with T.Scale("device"):
                if back == "reduce_scatter":
                    T.reduce_scatter(made, Y)
                elif back == "all_to_all":
                    T.all_to_all(made, Y)

    return f


def by_offsets(
    devices: int, experts: int, tokens: int, tile: int, *, slots: bool = False, form: str = "loop", back: bool = False
) -> Any:
    """Gather rows that are sorted by expert on each device, and scale them by the expert's number.

    Args:
        back: whether the results of all devices are added up on the rows' sources.
        form: whether a block takes the rows of an expert in a "loop", there are blocks for as many as there may be and
            a "branch", or a block loads its rows by their "elements".
    """
    tiles = -(-tokens // tile)
    every, one = (devices * tokens, WIDE), (tokens, WIDE)
    if slots:
        every, one = (devices, *one), (1, *one)

    @T.macro
    def scaled(whole, result, source, begin, end, expert):
        x = T.alloc((tile, WIDE), "float32", level="l1")
        if form == "elements":
            for i, j in T.Parallel(tile, WIDE):
                if begin + i < end:
                    x[i, j] = whole[source, begin + i, j] if slots else whole[source * tokens + begin + i, j]
        elif slots:
            T.copy(whole[source, begin, 0], x)
        else:
            T.copy(whole[source * tokens + begin, 0], x)
        for i, j in T.Parallel(tile, WIDE):
            if begin + i < end:
                if slots:
                    result[source, begin + i, j] = x[i, j] * (expert + 2)
                else:
                    result[source * tokens + begin + i, j] = x[i, j] * (expert + 2)

    @T.prim_func
    def f(
        X: T.Tensor(one, "float32"),
        N: T.Tensor((devices, experts + 1), "int32"),
        Y: T.Tensor(one if back else every, "float32"),
    ):
        grid = (1 if form == "loop" else tiles, devices * experts)
        with T.Kernel(device=devices, block=grid, threads=32) as (b, p):
            whole = T.alloc(every, "float32", level="l2")
            made = T.alloc(every, "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, whole)
            with T.Scale("block"):
                source, expert = p // experts, p % experts
                end = N[source, expert + 1]
                if form == "loop":
                    for turn in T.serial(T.ceildiv(end - N[source, expert], tile)):
                        scaled(whole, made if back else Y, source, N[source, expert] + turn * tile, end, expert)
                else:
                    begin = N[source, expert] + b * tile
                    if begin < end:
                        scaled(whole, made if back else Y, source, begin, end, expert)
            with T.Scale("device"):
                if back:
                    T.reduce_scatter(made, Y)

    return f


def arguments(func: Any, devices: int, most: int, seed: int = 0) -> Tensors:
    """An X of whole numbers, so that sums are exact, numbers of rows or where experts begin, and a poisoned Y."""
    x, n, y = (tuple(int(n) for n in b.shape) for _, b in ir.parameters(func))
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, most + 1, n, generator=rng, dtype=torch.int32)
    if len(n) == 2:
        numbers = numbers.sort(1).values
        numbers[:, 0], numbers[:, -1] = 0, most
    return [
        [torch.randint(-9, 9, x, generator=rng).float(), numbers, torch.full(y, torch.nan)] for _ in range(devices)
    ]


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 4),
    experts=st.integers(1, 3),
    capacity=st.integers(1, 9),
    tile=st.sampled_from((2, 3, 4)),
    slots=st.booleans(),
    gathers=st.booleans(),
    guard=st.sampled_from(("", "", "loop", "branch")),
    back=st.sampled_from(("", "all_to_all", "reduce_scatter", "reduce_scatter")),
    chunk=st.none() | st.integers(1, 20),
    carrier=st.sampled_from((None, "queue")),
    ordered=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rows_of_experts_are_the_same(
    devices: int, experts: int, capacity: int, tile: int, chunk: int | None, ordered: bool, seed: int, **given: Any
):
    carrier = given.pop("carrier")
    func = with_capacity(devices, experts, capacity, tile, **given)
    changed, schedule = overlapped(func, chunk=chunk, ordered=ordered, carrier=carrier)
    assert all(move.overlapped for move in schedule.moves), schedule
    check_same(func, changed, arguments(func, devices, capacity, seed), seeds=(None, 1))


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 4),
    experts=st.integers(1, 3),
    tokens=st.integers(1, 12),
    tile=st.sampled_from((1, 2, 3, 4)),
    slots=st.booleans(),
    form=st.sampled_from(("loop", "branch", "elements")),
    back=st.booleans(),
    chunk=st.none() | st.integers(1, 12),
    ordered=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rows_that_are_looked_up_are_the_same(
    devices: int, experts: int, tokens: int, tile: int, chunk: int | None, ordered: bool, seed: int, **given: Any
):
    func = by_offsets(devices, experts, tokens, tile, **given)
    changed, schedule = overlapped(func, chunk=chunk, ordered=ordered)
    for move in schedule.moves:  # where rows go that are looked up, only the device's own dimension is known
        made = move.collective == "reduce_scatter" and not given["slots"]
        assert not move.overlapped and "'N' says" in move.why if made else move.overlapped, schedule
    check_same(func, changed, arguments(func, devices, tokens, seed), seeds=(None, 1))


def test_chunks_may_be_less_than_an_expert():
    changed, schedule = overlapped(with_capacity(2, 3, 8, 4, back="all_to_all"), chunk=4)
    text, (there, back) = changed.script(), schedule.moves
    assert there.chunk == back.chunk == 4 and there.ordered and back.ordered
    assert "T.tilescale.wait(T.region(come_here" in text and "all_to_all" not in text


def test_chunks_of_whole_experts_stay_one_exchange():
    changed, _ = overlapped(with_capacity(2, 3, 8, 4), chunk=17)
    assert "chunk=2, slots=1" in changed.script()


def test_each_tile_waits_for_no_more_than_the_rows_that_it_looks_up():
    changed, schedule = overlapped(by_offsets(2, 2, 12, 4), chunk=4)
    waits = [stmt for stmt in ir.statements(changed.body) if is_wait(stmt)]
    assert len(waits) == 2 and schedule.moves[0].ordered  # four rows overlap two chunks at most
    assert "first_chunk: T.int32 = T.min(" in changed.script()


def test_a_look_up_that_is_not_awaited_would_race():
    changed, _ = overlapped(by_offsets(2, 2, 12, 4), chunk=4)
    broken = changed.with_body(tir.rewrite(changed.body, leave=lambda n: tir.sequence([]) if is_wait(n) else None))
    with pytest.raises(RaceError):
        tilescale.emulate(broken, arguments(changed, 2, 12), machine=H200, time=False)


def is_wait(node: Any) -> bool:
    return isinstance(node, ir.Evaluate) and ir.op_name(node.value) == WAIT.name


# -- what stays in order -----------------------------------------------------------------------------------------------


def listed(*, makes: bool = False, changes: bool = False) -> Any:
    """Rows of a list: gathered ones that are read or, with `makes`, ones that are written and then added up.

    Args:
        changes: whether the grid also writes the list, and takes the rows of a tile from one element of it.
    """

    @T.prim_func
    def f(X: T.Tensor((16, WIDE), "float32"), N: T.Tensor((4, 4), "int32"), Y: T.Tensor((16, WIDE), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            whole = T.alloc((32, WIDE), "float32", level="l2")
            with T.Scale("device"):
                if not makes:
                    T.all_gather(X, whole)
            with T.Scale("block"):
                x = T.alloc((4, WIDE), "float32", level="l1")
                if makes:
                    T.copy(X[b * 4, 0], x)
                    T.copy(x, whole[N[b, 0], 0])
                elif changes:
                    T.copy(whole[N[b, 0], 0], x)
                    N[b, 0] = 0
                else:
                    for i, j in T.Parallel(4, WIDE):
                        x[i, j] = whole[N[b, i], j]
                if not makes:
                    T.copy(x, Y[b * 4, 0])
            with T.Scale("device"):
                if makes:
                    T.reduce_scatter(whole, Y)

    return f


@pytest.mark.parametrize(
    ("against", "where"),
    [({}, "for i, j in"), ({"changes": True}, "T.copy(whole[N"), ({"makes": True}, "T.copy(x, whole")],
)
def test_rows_that_only_the_launch_knows_stay_in_order(against: dict[str, bool], where: str):
    func = listed(**against)
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert changed.same_as(func) and not move.overlapped
    assert move.why == f"which rows a tile touches is known at launch only: 'N' says (line {line(listed, where)})"


def test_offsets_that_are_on_their_way_are_not_looked_up():
    """The offsets of experts are gathered too: overlapped, a tile could load them before they arrive."""
    program = load(NUMBERED[24]).by_offsets(2, 2, 64, 64, 64)
    for kept, moved in ((("begins",), [False, True]), ((), [True, False])):
        moves = overlapped(program, kept=kept)[1].moves
        assert [move.overlapped for move in moves] == moved, moves
