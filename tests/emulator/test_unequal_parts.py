# SPDX-License-Identifier: MIT
"""All-to-alls of unequal parts: results, supported arguments, errors."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import DTYPES, WORLDS, values
from tilescale.collectives.estimate import estimate
from tilescale.errors import OutOfBoundsError, PhaseError, RankMismatchError, ShapeError, UsageError


def exchange(world: int, source: tuple[int, ...], target: tuple[int, ...], dtype: str = "float32", **options: Any):
    """An exchange from X to Y, with numbers in device memory."""

    @T.prim_func
    def program(
        X: T.Tensor(source, dtype),
        sent: T.Tensor((world,), "int32"),
        Y: T.Tensor(target, dtype),
        received: T.Tensor((world,), "int32"),
    ):
        with T.Kernel(device=world):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent, received, **options)

    return program


def numbers(world: int, most: int, seed: int = 0) -> torch.Tensor:
    """Number of rows from each rank to each; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-1, most + 1, (world, world), generator=generator)).clamp(min=0).int()


def tensors(counts: torch.Tensor, source: tuple[int, ...], target: tuple[int, ...], dtype: str = "float32") -> list:
    """Arguments of each device: its rows, their counts by destination, and poisoned results."""
    world = len(counts)
    return [
        [values(r, *source, dtype=dtype), counts[r].clone()]
        + [torch.full(target, 64.0).to(DTYPES[dtype]), torch.full((world,), -1, dtype=torch.int32)]
        for r in range(world)
    ]


def check(counts: torch.Tensor, args: list) -> None:
    """Rows are at their positions, and those after the last one are unchanged."""
    for rank, (_, _, found, received) in enumerate(args):
        sent = [(args[r][0], int(counts[r, :rank].sum()), int(counts[r, rank])) for r in range(len(counts))]
        want = torch.cat([x[begin : begin + count] for x, begin, count in sent])
        assert torch.equal(found[: len(want)].float(), want.float()), (rank, counts)
        assert found[len(want) :].float().eq(64).all()
        assert torch.equal(received, counts[:, rank])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("most", [0, 1, 5])
def test_rows_come_where_they_belong(world: int, most: int):
    counts, shape = numbers(world, most, seed=most), (world * 5 + 1, 3)
    args = tensors(counts, shape, shape)
    tilescale.emulate(exchange(world, shape, shape), args)
    check(counts, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [(), (2, 3)])
def test_rows_of_any_shape_and_type(dtype: str, rest: tuple[int, ...]):
    counts, source, target = numbers(3, 4, seed=2), (12, *rest), (13, *rest)
    args = tensors(counts, source, target, dtype)
    tilescale.emulate(exchange(3, source, target, dtype), args)
    check(counts, args)


@pytest.mark.parametrize("impl", ["direct", "nccl"])
def test_every_algorithm(impl: str):
    counts = numbers(4, 3)
    args = tensors(counts, (12, 2), (12, 2))
    report = tilescale.emulate(exchange(4, (12, 2), (12, 2), impl=impl), args)
    check(counts, args)
    assert f"all_to_all_v ({impl})" in {span.name for span in report.timeline.spans}


@pytest.mark.parametrize("sent", [[2, 0, 1], [[2, 0, 1], [0, 0, 0], [3, 1, 4]]])
def test_numbers_of_the_program(sent: list):
    @T.prim_func
    def program(X: T.Tensor((8, 2), "float32"), Y: T.Tensor((6, 2), "float32"), got: T.Tensor((3,), "int32")):
        with T.Kernel(device=3):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent, received=got)

    counts = torch.tensor(sent if isinstance(sent[0], list) else [sent] * 3, dtype=torch.int32)
    args = tensors(counts, (8, 2), (6, 2))
    tilescale.emulate(program, [[x, y, got] for x, _, y, got in args])
    check(counts, args)


def test_parts_of_tensors_and_other_groups():
    """From some rows of a tensor to some of another one; between the devices of each node."""

    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((9, 2), "float32"), sent: T.Tensor((2,), "int32"), Y: T.Tensor((9, 2), "float32")):
            with T.Kernel(node=2, device=2):
                with T.Scale("device"):
                    T.all_to_all_v(X[3:9, :], Y[2:8, :], sent)

    args = [[values(r, 9, 2), torch.tensor([1 + r % 2, 2]).int(), torch.full((9, 2), 64.0)] for r in range(4)]
    tilescale.emulate(program, args, machine="h200-sxm-8x4")
    for unit, (_, _, found) in enumerate(args):
        first, second = (args[unit // 2 * 2 + r][0] for r in range(2))
        want = torch.cat([first[3:4], second[3:5]] if unit % 2 == 0 else [first[4:6], second[5:7]])
        assert torch.equal(found[2 : 2 + len(want)], want)
        assert found[:2].eq(64).all() and found[2 + len(want) :].eq(64).all()


def test_ranks_may_have_tensors_of_different_lengths():
    given, room = T.dynamic("given"), T.dynamic("room")
    counts = numbers(3, 4, seed=5)
    sizes = [((int(counts[r].sum()), 2), (int(counts[:, r].sum()), 2)) for r in range(3)]
    args = [tensors(counts, *size)[r] for r, size in enumerate(sizes)]
    tilescale.emulate(exchange(3, (given, 2), (room, 2)), args)
    check(counts, args)


def test_an_extent_on_which_more_depends_is_the_same_on_all_ranks():
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n, 2), "float32"), sent: T.Tensor((2,), "int32"), Y: T.Tensor((8, 2), "float32")):
        with T.Kernel(device=2):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent)
                T.copy(Y[0:n, :], X)

    args = [[values(r, 2 + r, 2), torch.ones(2).int(), torch.zeros(8, 2)] for r in range(2)]
    with pytest.raises(RankMismatchError, match="'X' makes n = 2 on rank 0 and 3 on rank 1"):
        tilescale.emulate(program, args)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([[1, 2], [4, 3]], r"rank 1 of level 'device' sends \[4, 3\] rows, src has 6"),
        ([[1, -2], [0, 3]], r"rank 0 of level 'device' sends \[1, -2\] rows, src has 6"),
        ([[0, 3], [0, 3]], r"rank 1 of level 'device' gets \[3, 3\] rows, dst has 5"),
    ],
)
def test_rows_that_do_not_fit(sent: list[list[int]], text: str):
    args = tensors(torch.tensor(sent).int(), (6, 2), (5, 2))
    with pytest.raises(OutOfBoundsError, match=text) as caught:
        tilescale.emulate(exchange(2, (6, 2), (5, 2)), args)
    assert caught.value.where[0].file == __file__ and "dst holds all received rows" in caught.value.hint


def traced(mistake: Any) -> None:
    """A program with the statement of a macro in a phase of devices."""

    @T.prim_func
    def program(X: T.Tensor((6, 2), "float32"), n: T.Tensor((2,), "int32"), wide: T.Tensor((2,), "int64")):
        with T.Kernel(device=2, block=2):
            Y = T.alloc((6, 2), "float32", level="l2")
            with T.Scale("device"):
                mistake(X, Y, n, wide)
            with T.Scale("block"):
                T.sync_threads()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y[:, 0:1], n), ShapeError, "rows of one shape and type"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, wide), UsageError, "numbers of rows are int32 in device memory"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, n, X), UsageError, "received=X): float32, in global"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, n[0:1]), ShapeError, "(1,) numbers for 2 ranks"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, [1, 2, 3]), ShapeError, "a list of `size` numbers"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, [1, -1]), ShapeError, "a list of `size` numbers"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, [4, 3]), ShapeError, "rank 0 sends 7 rows, src has 6"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, [[0, 4], [0, 3]]), ShapeError, "rank 1 gets 7 rows, dst has 6"),
        (lambda X, Y, n, wide: T.all_to_all_v(X, Y, n, impl="pairwise"), UsageError, "has direct, nccl for whole"),
    ],
)
def test_mistakes_are_told_with_their_line(wrong: Any, error: type, text: str):
    with pytest.raises(error) as caught:
        traced(wrong)
    assert text in str(caught.value) and caught.value.where[0].file == __file__ and caught.value.hint


def test_programs_cannot_exchange_rows():
    with pytest.raises(PhaseError, match="a device exchanges whole tensors"):

        @T.prim_func
        def program(X: T.Tensor((6, 2), "float32"), n: T.Tensor((2,), "int32"), Y: T.Tensor((6, 2), "float32")):
            with T.Kernel(device=2, block=2), T.Scale("block"), T.Scale("device"):
                T.all_to_all_v(X, Y, n)


# -- time --------------------------------------------------------------------------------------------------------------


def simulated(counts: torch.Tensor, rows: int) -> float:
    """Microseconds of an exchange of rows of 4 KiB."""
    args = tensors(counts, (rows, 1024), (rows, 1024))
    report = tilescale.emulate(exchange(len(counts), (rows, 1024), (rows, 1024)), args, machine="h200-sxm-8")
    (span,) = {(span.begin_s, span.end_s) for span in report.timeline.spans if span.kind == "collective"}
    return (span[1] - span[0]) * 1e6


def test_time_is_that_of_the_rows_that_travel():
    """Bound by the busiest link: local rows cost no time, and one long part costs as much as many."""
    world, rows = 4, 4096
    equal = torch.full((world, world), rows // world).int()
    kept, one = torch.diag(torch.full((world,), rows)).int(), torch.zeros(world, world).int()
    one[0, 1] = 3 * rows // world
    times = [simulated(counts, rows) for counts in (equal, one, kept)]
    assert times[0] == pytest.approx(times[1], rel=0.02)
    assert times[2] < 0.2 * times[0]
    machine = tilescale.Machine.load("h200-sxm-8")
    like = estimate(machine, "device", "all_to_all", "direct", rows * 4096, units=range(world)).seconds
    parts = tuple(int(n) * 4096 for n in equal.flatten())
    mine = estimate(machine, "device", "all_to_all_v", "direct", 0, units=range(world), parts=parts).seconds
    assert mine == pytest.approx(like)


def test_time_without_data_takes_numbers_of_the_program_or_equal_parts():
    def microseconds(sent: list[int] | None) -> float:
        @T.prim_func
        def program(X: T.Tensor((4096, 64), "float32"), n: T.Tensor((4,), "int32"), Y: T.Tensor((4096, 64), "float32")):
            with T.Kernel(device=4):
                with T.Scale("device"):
                    T.all_to_all_v(X, Y, n if sent is None else sent)

        rows = [torch.empty(4096, 64, device="meta") for _ in range(2)]
        args = [[rows[0], torch.empty(4, dtype=torch.int32, device="meta"), rows[1]]] * 4
        report = tilescale.emulate(program, args, machine="h200-sxm-8")
        (span,) = {(s.begin_s, s.end_s) for s in report.timeline.spans if s.kind == "collective"}
        return (span[1] - span[0]) * 1e6

    assert microseconds(None) == pytest.approx(microseconds([1024] * 4))
    assert microseconds([0, 0, 0, 8]) < microseconds(None)


def test_a_program_in_words_is_the_program_again():
    text = tilescale.compile(exchange(2, (6, 2), (6, 2)), machine="h200-sxm-8").python
    assert "T.all_to_all_v(X, Y, sent, received=received)" in text

    @T.prim_func
    def known(X: T.Tensor((6, 2), "float32"), Y: T.Tensor((6, 2), "float32")):
        with T.Kernel(device=2):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, [[1, 2], [0, 3]])

    assert "T.all_to_all_v(X, Y, [[1, 2], [0, 3]])" in tilescale.compile(known, machine="h200-sxm-8").python
