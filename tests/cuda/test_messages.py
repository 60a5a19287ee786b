# SPDX-License-Identifier: MIT
"""Kernels of collectives on the host: all ranks, blocks and threads concurrently, in the system's order."""

import math
import random
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.host_ranks import LIMIT_NS, Library, Ranks, shorten
from tilescale.backends.cuda.running import nccl
from tilescale.backends.cuda.running.collectives import LAUNCHERS, exchanges, hierarchical, rounds
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, combining, moving, moving_units
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.timeouts import WaitFailure
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.numerics.dtypes import to_numpy
from tilescale.backends.emulator.operations import pieces
from tilescale.backends.tilelang.lowering.implemented import BY_ROUNDS
from tilescale.collectives import records, schedule

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SHORT = 400
"""Bytes of a part that still goes as short messages, in these tests."""

COUNTS = (1, 2, 7, 33, 64, 150, 700, 2500)
"""Elements of a part, of short and long messages, of which the last ones take several rounds."""

ALGORITHMS = [
    ("allreduce", "one_shot"),
    ("allreduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("all_to_all", "direct"),
    ("broadcast", "direct"),
]
NARROW = ("float8_e4m3fn", "float8_e5m2")
TYPES = [("float32", "max"), ("float16", "prod"), ("int32", "sum"), ("int8", "min")]


def compiled() -> Iterator[HeaderKernel]:
    """All kernels that these tests run."""
    sums, moves = combining("bfloat16", "sum"), moving("bfloat16")
    for form in ("words", "lines", "slots"):
        yield HeaderKernel("reduce", form, sums, 3, ("true",))
        yield HeaderKernel("reduce", form, sums, 3, ("false",))
        yield HeaderKernel("reduce_twice", form, sums, 3)
        yield HeaderKernel("move", form, moves, 3, ("true",))
        yield HeaderKernel("move", form, moves, 3, ("false",))
        yield HeaderKernel("broadcast", form, moves, 3)
    yield HeaderKernel("move", "straight", moves, 3, ("true",))
    yield HeaderKernel("move", "straight", moves, 3, ("false",))
    for form in ("words", "lines", "slots"):
        yield HeaderKernel("reduce", form, sums, 2, ("true",))
        yield HeaderKernel("reduce_twice", form, sums, 2)
        for dtype, op in TYPES:
            yield HeaderKernel("reduce", form, combining(dtype, op), 2, ("true",))
        for dtype in NARROW:
            yield HeaderKernel("reduce_twice", form, combining(dtype, "sum"), 3)
    for ranks in (2, 3, 4):
        yield HeaderKernel("play", "rounds", sums, ranks)
        yield HeaderKernel("play", "rounds", moving_units("bfloat16"), ranks)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tuple(compiled()), tmp_path_factory.mktemp("host"))


@pytest.fixture(params=["words", "lines"])
def job(request: pytest.FixtureRequest, library: Library, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Make a job with a number of units of each level."""
    shorten(monkeypatch, request.param, SHORT)
    return lambda **sizes: Ranks(monkeypatch, library, sizes)


def stand(
    name: str, dtype: str = "bfloat16", op: str = "sum", level: str = "device", axis: int = 0
) -> PlacedCollective:
    reduction = {"reduction": op} if name in ("allreduce", "reduce_scatter") else {}  # others have none to ask for
    made = SimpleNamespace(name=name, level=level, axis=axis, call=None, norm=None, wire=None, **reduction)
    return PlacedCollective(made, None, dtype, None, lambda: None)


def randoms(count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Numbers that begin `shift` elements after a multiple of 16 bytes."""
    made = (4 * torch.randn(count + shift + 16)).to(dtype)
    start = -made.data_ptr() // dtype.itemsize % (16 // dtype.itemsize)
    return made[start + shift : start + shift + count]


def total(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The parts combined in the order of ranks, types of 16 bits in float32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    functions = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = functions[op](result, part.to(wide))
    return result.to(dtype)


def wanted(name: str, given: list[torch.Tensor], rank: int, root: int, op: str, axis: int = 0) -> torch.Tensor:
    if name == "allreduce":
        return total(given, op)
    if name == "broadcast":
        return given[root]
    if name == "all_gather":
        return torch.cat(given, axis)
    parts = [x.chunk(len(given), axis)[rank] for x in given]
    return torch.cat(parts, axis) if name == "all_to_all" else total(parts, op)


def whole_numbers(count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """The same rounded: sums of some of them are exact in any order."""
    return randoms(count, dtype, shift).round_()


def check(
    call: Any,
    name: str,
    count: int,
    ranks: int,
    dtype: torch.dtype,
    op: str = "sum",
    shift: int = 0,
    numbers: Callable[..., torch.Tensor] = randoms,
) -> None:
    """One call of all ranks with new numbers, into poisoned memory whose surroundings must not change."""
    source = count * ranks if name in ("reduce_scatter", "all_to_all") else count
    target = count * ranks if name in ("all_gather", "all_to_all") else count
    in_place, root = name == "broadcast" or name == "allreduce" and count % 2, count % ranks
    given = [numbers(source, dtype, shift) for _ in range(ranks)]
    brought = [x.clone() for x in given]
    want = [wanted(name, brought, r, root, op) for r in range(ranks)]
    around = [torch.full((shift + target + 40,), 77).to(dtype) for _ in range(ranks)]
    outs = given if in_place else [x[shift + 16 : shift + 16 + target] for x in around]
    call([Operands(x, out, root) for x, out in zip(given, outs, strict=True)])
    for rank, out in enumerate(outs):
        assert in_place or torch.equal(given[rank], brought[rank]), "what a rank brings stays"
        assert torch.equal(out, want[rank]), (name, count, rank, (out != want[rank]).nonzero()[:5])
        beside = torch.cat([around[rank][: shift + 16], around[rank][shift + 16 + target :]])
        assert beside.eq(77).all(), "nothing beside it changes"


@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS)
def test_calls_of_changing_sizes(name: str, algorithm: str, job: Callable[..., Ranks]):
    three = job(device=3)
    call, chance = three.collective(stand(name), algorithm), random.Random(3)
    for count in [*COUNTS, *chance.choices(COUNTS, k=6)]:
        check(call, name, count, 3, torch.bfloat16, shift=chance.choice([0, 0, 1]))
    assert not three.reports.any()


@pytest.mark.parametrize("operation", BY_ROUNDS)
def test_rounds_of_any_algorithm(operation: str, job: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch):
    """Of each algorithm, by as many ranks as it takes, in one launch and in several."""
    for name in BY_ROUNDS[operation]:
        ranks = 4 if records()[name].power_of_two or name != "ring" else 3
        several = job(device=ranks)
        call = several.collective(stand(operation), name)
        for count, room in ((1, 1 << 20), (7, 1 << 20), (160, 1 << 20), (700, 1000)):
            monkeypatch.setattr(rounds, "INBOX_BYTES", room)
            check(call, operation, count, ranks, torch.bfloat16, shift=count % 2, numbers=whole_numbers)
        assert not several.reports.any()


@pytest.mark.parametrize(("dtype", "op"), TYPES)
def test_types_and_reductions(dtype: str, op: str, job: Callable[..., Ranks]):
    call = job(device=2).collective(stand("allreduce", dtype, op), "one_shot")
    for count in (1, 77, 1500):
        check(call, "allreduce", count, 2, getattr(torch, dtype), op)


def test_numbers_that_are_none_stay(job: Callable[..., Ranks]):
    call = job(device=2).collective(stand("allreduce", "float32", "max"), "one_shot")
    parts = [torch.tensor([math.nan, 1, 2, 3.0]), torch.tensor([0, math.nan, 5, -1.0])]
    call([Operands(x, x) for x in parts])
    assert all(torch.equal(x.isnan(), torch.tensor([True, True, False, False])) for x in parts)


@pytest.mark.parametrize("count", [50, 700])
def test_counts_of_messages_wrap(count: int, job: Callable[..., Ranks]):
    two = job(device=2)
    for algorithm in ("one_shot", "two_shot"):
        call = two.collective(stand("allreduce"), algorithm)
        for _ in range(4):  # so that all slots of long messages have been used
            check(call, "allreduce", count, 2, torch.bfloat16)
        for own in two.owners:
            for shape, workspace in own.exchanges._made.items():
                workspace.counts.fill_(-4)  # 2**32 - 4
                if shape.form != "slots":
                    workspace.slots.zero_()  # as where no message was so long before
        for _ in range(6):
            check(call, "allreduce", count, 2, torch.bfloat16)


def test_groups_of_one_level_of_two(job: Callable[..., Ranks]):
    """Devices of a level whose neighbours are far apart, and of one whose are not: two groups of three each."""
    for level in ("node", "device"):
        sizes = {"node": 2, "device": 3} if level == "device" else {"node": 3, "device": 2}
        six = job(**sizes)
        call = six.collective(stand("all_gather", level=level), "direct")
        for count in (5, 900):
            given = [randoms(count, torch.bfloat16) for _ in range(6)]
            outs = [torch.zeros(3 * count, dtype=torch.bfloat16) for _ in range(6)]
            call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
            for rank, out in enumerate(outs):
                of_group = rank - six.rank_at(rank, level) * (1 if level == "device" else 2)
                members = [of_group + r * (1 if level == "device" else 2) for r in range(3)]
                assert torch.equal(out, torch.cat([given[m] for m in members]))


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_tensors_cut_along_another_dimension(name: str, job: Callable[..., Ranks]):
    call = job(device=3).collective(stand(name, axis=1), "direct")
    narrow, wide = (7, 4), (7, 12)
    given = [randoms(84 if name != "all_gather" else 28, torch.bfloat16) for _ in range(3)]
    given = [x.view(narrow if name == "all_gather" else wide) for x in given]
    outs = [torch.zeros(narrow if name == "reduce_scatter" else wide, dtype=torch.bfloat16) for _ in range(3)]
    call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
    for rank, out in enumerate(outs):
        assert torch.equal(out, wanted(name, given, rank, 0, "sum", axis=1))


def test_one_rank_alone_copies(job: Callable[..., Ranks]):
    call = job(device=1).collective(stand("all_gather"), "direct")
    x, out = torch.arange(5.0), torch.zeros(5)
    call([Operands(x, out)])
    assert torch.equal(x, out)


@pytest.mark.parametrize(("name", "algorithm"), [("broadcast", "direct"), ("allreduce", "one_shot")])
def test_one_rank_alone_does_nothing_in_place(
    name: str, algorithm: str, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """Not even a copy to where it comes from: a graph of that would be empty, which PyTorch warns of."""
    (own,) = Ranks(monkeypatch, library, {"device": 1}).owners
    x = torch.arange(6.0)
    bound = LAUNCHERS[name, algorithm](own, stand(name))
    assert bound(Operands(x, x.view(6))) == []
    assert len(bound(Operands(x, torch.zeros(6)))) == 1


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_groups_that_share_memory(name: str, library: Library, monkeypatch: pytest.MonkeyPatch):
    """Kernels inside two groups of three, messages between threads; chunks of 500 elements are long, tails short."""
    shorten(monkeypatch, "words", SHORT)
    monkeypatch.setattr(hierarchical, "chunk_bytes", lambda target: 1000)
    six = Ranks(monkeypatch, library, {"device": 6}, shift=0, group_size=3)
    call = six.collective(stand(name), "hierarchical_direct")
    for count in (1, 2, 7, 150, 1300):
        check(call, name, count, 6, torch.bfloat16, shift=count % 2, numbers=whole_numbers)
    assert not six.reports.any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(6,), (3, 4), (0, 4), (0,)])
def test_what_a_library_does_not_know_goes_as_bytes(dtype: torch.dtype, shape: tuple[int, ...]):
    """The first dimension stays, as all-to-alls count along it."""
    given = torch.zeros(shape).to(dtype)
    sent = nccl.moved(given)
    known = dtype in (torch.bfloat16, torch.int32)
    assert (sent is given) == known and sent.dtype == (dtype if known else torch.uint8)
    assert len(sent) == len(given) and sent.nbytes == given.nbytes and sent.data_ptr() == given.data_ptr()


SUMS = [(name, algorithm) for name, algorithm in LAUNCHERS if name in ("allreduce", "reduce_scatter")]


@pytest.mark.parametrize(("name", "algorithm"), [pair for pair in SUMS if records()[pair[1]].in_order])
def test_sums_have_the_bits_of_the_emulator(
    name: str, algorithm: str, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """Kernels add as the emulator plays: in 16 bits another order shows. Also where pieces are not of one length."""
    shorten(monkeypatch, "words", SHORT)
    monkeypatch.setattr(hierarchical, "chunk_bytes", lambda target: 1000)
    shape = (2, 3) if algorithm == "hierarchical_direct" else (4,) if (name, algorithm) in by_rounds() else (3,)
    job, units = Ranks(monkeypatch, library, {"device": math.prod(shape)}, group_size=shape[-1]), math.prod(shape)
    call, plan = job.collective(stand(name), algorithm), schedule(name, algorithm, shape)
    for count in (48, 149):
        given = [randoms(count * (1 if name == "allreduce" else units), torch.bfloat16) for _ in range(units)]
        values = [to_numpy(x) for x in given]
        if name == "allreduce":
            want = [total for (total,) in pieces.allreduce(plan, [(x.copy(),) for x in values], add)]
        else:
            want = pieces.reduce_scatter(plan, values, 0, add)
        outs = given if name == "allreduce" else [x[:count].clone() for x in given]
        call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
        for unit, out in enumerate(outs):
            assert (to_numpy(out) == want[unit]).all(), (count, unit)


@pytest.mark.parametrize("dtype", NARROW)
def test_sums_of_eight_bits_saturate_as_in_the_emulator(dtype: str, job: Callable[..., Ranks]):
    call = job(device=3).collective(stand("allreduce", dtype), "two_shot")
    for count in (33, 1500):
        given = [(40 * randoms(count, torch.float32)).to(getattr(torch, dtype)) for _ in range(3)]
        values = [(to_numpy(x).copy(),) for x in given]
        want = pieces.allreduce(schedule("allreduce", "two_shot", 3), values, add)
        call([Operands(x, x) for x in given])
        for x, (total,) in zip(given, want, strict=True):
            assert (x.view(torch.uint8).numpy() == total.view("uint8")).all()


def add(values: list[pieces.Value]) -> pieces.Value:
    """As the emulator adds up."""
    arrays = [array for (array,) in values]
    return (numerics.reduce_many(arrays, "sum", arrays[0].dtype),)


def by_rounds() -> set[tuple[str, str]]:
    return {(operation, name) for operation, played in BY_ROUNDS.items() for name in played}


def test_sums_of_groups_are_added_in_float32():
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert hierarchical.combined(parts, "sum").item() == 258.0


def in_heaps(ranks: Ranks, count: int, who: tuple[int, ...]) -> list[torch.Tensor]:
    """A poisoned target for each rank: a symmetric one, at a place of its own, of those in `who`."""
    made = []
    for rank, own in enumerate(ranks.owners):
        whole = own.heap.zeros((2 * count + 16 * ranks.size,), torch.uint8).view(torch.bfloat16)
        out = whole[8 * rank : 8 * rank + count] if rank in who else torch.zeros(count, dtype=torch.bfloat16)
        made.append(out.fill_(77))
    return made


@pytest.mark.parametrize("who", [(0, 1, 2), (0, 2), ()])
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_what_is_moved_goes_straight_into_symmetric_targets(
    name: str, who: tuple[int, ...], job: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
):
    """If all ranks have one; in calls of changing sizes, of which short ones go by messages."""
    three = job(device=3)
    call = three.collective(stand(name), "direct")
    for part in (24, 2400, 8, 3208, 2400, 2405):
        whole = 3 * part
        outs = in_heaps(three, whole, who)
        given = [randoms(part if name == "all_gather" else whole, torch.bfloat16) for _ in range(3)]
        want = [wanted(name, given, rank, 0, "sum") for rank in range(3)]
        counts = [[w.counts.clone() for w in own.exchanges._made.values()] for own in three.owners]
        call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
        assert all(torch.equal(out, right) for out, right in zip(outs, want, strict=True)), (part, who)
        if part in (3208, 2405):  # the workspace of both is there by now
            now = [[w.counts for w in own.exchanges._made.values()] for own in three.owners]
            told = max(int((b - a).max()) for x, y in zip(counts, now, strict=True) for a, b in zip(x, y, strict=True))
            assert (told == 1) == (len(who) == 3 and part == 3208), "one flag tells of everything, or several do"
    assert not three.reports.any()


def test_targets_of_each_call_are_of_another_kind(job: Callable[..., Ranks]):
    """A rank's signal about its target in one call is not taken for that of a later one."""
    three = job(device=3)
    call = three.collective(stand("all_gather"), "direct")
    for who in ((0, 1, 2), (), (1,), (0, 1, 2), (0, 2), (0, 1, 2)):
        for part in (3208, 24):
            outs, given = in_heaps(three, 3 * part, who), [randoms(part, torch.bfloat16) for _ in range(3)]
            call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
            want = [wanted("all_gather", given, rank, 0, "sum") for rank in range(3)]
            assert all(torch.equal(out, right) for out, right in zip(outs, want, strict=True)), (part, who)
    assert not three.reports.any()


def test_who_has_no_symmetric_target_does_not_ask(job: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch):
    """Its kernel is the one for messages alone, for any kernels of the others."""
    three = job(device=3)
    call, launched, functions = three.collective(stand("all_gather"), "direct"), exchanges.launch, []

    def launch(function: Any, *rest: Any) -> Any:
        functions.append(function)
        return launched(function, *rest)

    monkeypatch.setattr(exchanges, "launch", launch)
    asking, others = set(), set()
    for who in ((0, 2), (0, 1, 2), ()):
        functions.clear()
        outs, given = in_heaps(three, 3 * 3208, who), [randoms(3208, torch.bfloat16) for _ in range(3)]
        call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
        asking |= {functions[rank] for rank in who}
        others |= {functions[rank] for rank in range(3) if rank not in who}
    assert len(asking) == len(others) == 1 and asking != others


@pytest.mark.parametrize("count", [50, 2500])
def test_who_does_not_come_is_named(count: int, job: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.cuda.host_ranks.LIMIT_NS", LIMIT_NS // 100)
    three = job(device=3)
    call = three.collective(stand("allreduce"), "one_shot")
    given = [randoms(count, torch.bfloat16) for _ in range(3)]
    call([Operands(x, x) for x in given], ranks=[0, 1])
    for rank in (0, 1):
        stopped, kind, site, absent = three.reports[rank, :4].tolist()
        assert (stopped, kind - 1, site, absent) == (1, WaitFailure.ABSENT, 0, 2)
        assert three.owners[rank].sites[0].what == "T.allreduce of level 'device'"
