# SPDX-License-Identifier: MIT
"""Copies and collectives that a device starts: what arrives, in which order; flags that are zero when a call begins."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import WORLDS, assert_same, blank, values
from tests.halves import half_at_night

SEEDS = (None, 0, 1, 2)


def flags(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def gather(world: int, rows: int, chunk: int | None, form: str, columns: int = 5):
    """Every device gathers; its blocks, one for each chunk of each rank, copy what has arrived into Y."""
    count = 1 if chunk is None else -(-rows // chunk)
    height = rows if chunk is None else chunk
    whole = (world * rows, columns) if form.startswith("joined") else (world, rows, columns)

    @T.prim_func
    def program(X: T.Tensor((rows, columns), "int32"), Y: T.Tensor((world, rows, columns), "int32")):
        with T.Kernel(device=world, block=(world, count), threads=32) as (r, c):
            G = T.alloc(whole, "int32", level="l2")
            arrived = T.alloc_flags((world, count))
            with T.Scale("device") as (rank, size):
                if form == "slots":
                    T.all_gather(X, G, signal=arrived, chunk=chunk)
                if form == "joined":
                    T.all_gather(X, G, signal=arrived, chunk=chunk)
                if form == "slots in place":
                    T.copy(X, G[rank, 0:rows, :])
                    T.all_gather(G[rank, 0:rows, :], G, signal=arrived, chunk=chunk)
                if form == "joined in place":
                    T.copy(X, G[rank * rows : (rank + 1) * rows, :])
                    T.all_gather(G[rank * rows : (rank + 1) * rows, :], G, signal=arrived, chunk=chunk)
            with T.Scale("block"):
                T.wait(arrived[r, c], ">=", 1)
                for i, j in T.Parallel(height, columns):
                    if c * height + i < rows:
                        if form.startswith("joined"):
                            Y[r, c * height + i, j] = G[r * rows + c * height + i, j]
                        else:
                            Y[r, c * height + i, j] = G[r, c * height + i, j]

    return program


@pytest.mark.parametrize(
    ("world", "form"), half_at_night(WORLDS, ["slots", "joined", "slots in place", "joined in place"])
)
def test_a_gather_brings_all_parts_to_all(world: int, form: str):
    rows, chunk = 7, 3  # the last chunk has one row
    parts = [values(r, rows, 5, dtype="int32") for r in range(world)]
    args = [[part.clone(), blank(world, rows, 5, dtype="int32")] for part in parts]
    report = tilescale.emulate(gather(world, rows, chunk, form), args)
    for _, found in args:
        assert_same(found, torch.stack(parts))
    for did in report.activity:
        assert did.sent == did.received == (world - 1) * rows * 5 * 4
        assert did.collectives == {"device all_gather (copy_engine)": 1}
        assert did.signals == world * 3, "one flag for each chunk on each device, this one included"


@pytest.mark.parametrize("chunk", [None, 1, 4, 8, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_of_any_size_in_any_order(chunk: int | None, seed: int | None):
    world, rows = 3, 8
    parts = [values(r, rows, 5, dtype="int32") for r in range(world)]
    args = [[part.clone(), blank(world, rows, 5, dtype="int32")] for part in parts]
    tilescale.emulate(gather(world, rows, chunk, "slots"), args, schedule_seed=seed)
    for _, found in args:
        assert_same(found, torch.stack(parts))


def test_a_gather_over_devices_of_each_node():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((2, 4), "int32")):
            with T.Kernel(node=2, device=2, threads=32):
                arrived = T.alloc_flags((2, 1))
                with T.Scale("device") as (rank, _):
                    T.all_gather(X, Y, signal=arrived)
                    for source in T.serial(2):
                        T.wait(arrived[source, 0], ">=", 1)

    args = [[values(r, 4, dtype="int32"), blank(2, 4, dtype="int32")] for r in range(4)]
    tilescale.emulate(program, args, machine="h200-sxm-8x4")
    for rank, (_, found) in enumerate(args):
        first = rank // 2 * 2
        assert_same(found, torch.stack([args[first][0], args[first + 1][0]]))


@pytest.mark.parametrize("world", [1, 3, 8])
def test_numbers_that_are_known_at_launch_only(world: int):
    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor((rows, 4), "int32"), Y: T.Tensor((rows, 4), "int32")):
        with T.Kernel(device=T.ALL, block=2, threads=32):
            with T.Scale("device") as (rank, size):
                G = T.alloc((size, rows, 4), "int32", level="l2")
                arrived = T.alloc_flags((size, T.ceildiv(rows, 4)))
                T.copy(X, G[rank, 0:rows, :])
                T.all_gather(G[rank, 0:rows, :], G, signal=arrived, chunk=4)
                for c in T.serial(T.ceildiv(rows, 4)):
                    T.wait(arrived[(rank + 1) % size, c], ">=", 1)
                T.copy(G[(rank + 1) % size, 0:rows, :], Y)

    args = [[values(r, 10, 4, dtype="int32"), flags(10, 4)] for r in range(world)]
    tilescale.emulate(program, args)
    for rank, (_, found) in enumerate(args):
        assert_same(found, args[(rank + 1) % world][0])


def test_a_part_of_the_result_that_is_not_the_own_one():
    """Two arguments may be one tensor, which is only known when the program runs."""

    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((2, 4), "int32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags((2, 1))
            with T.Scale("device"):
                T.all_gather(X, Y, signal=arrived)

    both = [flags(2, 4) for _ in range(2)]
    for rank, whole in enumerate(both):
        whole[rank] = rank + 1
    tilescale.emulate(program, [[whole[rank], whole] for rank, whole in enumerate(both)], check="none")
    assert all(whole.tolist() == [[1] * 4, [2] * 4] for whole in both)
    with pytest.raises(tilescale.errors.UsageError, match="not at the position of this unit"):
        tilescale.emulate(program, [[whole[1 - rank], whole] for rank, whole in enumerate(both)], check="none")


# -- all-to-all --------------------------------------------------------------------------------------------------------


def exchange(world: int, rows: int, chunk: int | None, slots: bool):
    """Every device exchanges; its blocks, one for each chunk of each rank, copy what has arrived into Y."""
    count, height = (1, rows) if chunk is None else (-(-rows // chunk), chunk)
    whole = (world, rows, 5) if slots else (world * rows, 5)

    @T.prim_func
    def program(X: T.Tensor(whole, "int32"), Y: T.Tensor((world, rows, 5), "int32")):
        with T.Kernel(device=world, block=(world, count), threads=32) as (r, c):
            G = T.alloc(whole, "int32", level="l2")
            arrived = T.alloc_flags((world, count))
            with T.Scale("device"):
                T.all_to_all(X, G, signal=arrived, chunk=chunk)
            with T.Scale("block"):
                T.wait(arrived[r, c], ">=", 1)
                for i, j in T.Parallel(height, 5):
                    if c * height + i < rows:
                        if slots:
                            Y[r, c * height + i, j] = G[r, c * height + i, j]
                        else:
                            Y[r, c * height + i, j] = G[r * rows + c * height + i, j]

    return program


@pytest.mark.parametrize(
    ("world", "chunk", "seed", "slots"),
    [(1, 3, None, True), (2, 3, 0, False), (3, None, 1, False), (3, 9, None, True), (4, 1, 2, True), (8, 3, 0, False)],
)
def test_an_all_to_all_brings_everybody_its_parts(world: int, chunk: int | None, seed: int | None, slots: bool):
    rows = 7
    sent = [values(r, world, rows, 5, dtype="int32") for r in range(world)]
    given = [[x if slots else x.flatten(0, 1), blank(world, rows, 5, dtype="int32")] for x in sent]
    report = tilescale.emulate(exchange(world, rows, chunk, slots), given, schedule_seed=seed)
    for rank, (_, found) in enumerate(given):
        assert_same(found, torch.stack([x[rank] for x in sent]))
    for did in report.activity:
        assert did.sent == did.received == (world - 1) * rows * 5 * 4
        assert did.collectives == {"device all_to_all (copy_engine)": 1}


@pytest.mark.parametrize("world", [1, 3])
def test_an_all_to_all_of_as_many_devices_as_there_are(world: int):
    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor((rows, 4), "int32"), Y: T.Tensor((rows, 4), "int32")):
        with T.Kernel(device=T.ALL, block=2, threads=32):
            with T.Scale("device") as (rank, size):
                G = T.alloc((size, rows // size, 4), "int32", level="l2")
                arrived = T.alloc_flags((size, T.ceildiv(rows // size, 2)))
                for part in T.serial(size):
                    T.copy(X[part * (rows // size) : (part + 1) * (rows // size), :], G[part, 0 : rows // size, :])
                back = T.alloc((size, rows // size, 4), "int32", level="l2")
                T.all_to_all(G, back, signal=arrived, chunk=2)
                for source, c in T.grid(size, T.ceildiv(rows // size, 2)):
                    T.wait(arrived[source, c], ">=", 1)
                for part in T.serial(size):
                    T.copy(back[part, 0 : rows // size, :], Y[part * (rows // size) : (part + 1) * (rows // size), :])

    args = [[values(r, 3 * world, 4, dtype="int32"), flags(3 * world, 4)] for r in range(world)]
    tilescale.emulate(program, args)
    for rank, (_, found) in enumerate(args):
        assert_same(found, torch.cat([given.chunk(world)[rank] for given, _ in args]))


# -- copies ------------------------------------------------------------------------------------------------------------


def handed_on(world: int, rounds: int):
    """Blocks multiply; the queue sends each finished chunk to the next device, which adds it up after a wait."""

    @T.prim_func
    def program(X: T.Tensor((rounds, 4, 8), "int32"), Y: T.Tensor((rounds, 4, 8), "int32")):
        with T.Kernel(device=world, block=(4, rounds), threads=32) as (row, r):
            made = T.alloc((rounds, 4, 8), "int32", level="l2")
            inbox = T.alloc((rounds, 4, 8), "int32", level="l2")
            done, arrived = T.alloc_flags(rounds), T.alloc_flags(rounds)
            with T.Scale("device") as (rank, size):
                for i in T.serial(rounds):
                    T.copy(
                        made[i, :, :], inbox[i, :, :],
                        dst=(rank + 1) % size, signal=arrived[i], after=(done[i], ">=", 4),
                    )  # fmt: skip
            with T.Scale("block"):
                for j in T.Parallel(8):
                    made[r, row, j] = 2 * X[r, row, j]
                T.signal(done[r])
                T.wait(arrived[r], ">=", 1)
                for j in T.Parallel(8):
                    Y[r, row, j] = inbox[r, row, j] + 1

    return program


@pytest.mark.parametrize(("world", "seed"), half_at_night(WORLDS, SEEDS))
def test_copies_after_what_programs_have_counted(world: int, seed: int | None):
    args = [[values(r, 3, 4, 8, dtype="int32"), blank(3, 4, 8, dtype="int32")] for r in range(world)]
    tilescale.emulate(handed_on(world, 3), args, schedule_seed=seed)
    for rank, (_, found) in enumerate(args):
        assert_same(found, 2 * args[(rank - 1) % world][0] + 1)


@pytest.mark.parametrize(("compare", "value"), [("==", 2), ("!=", 0), (">", 1), ("<", 0), ("<=", -1)])
def test_every_comparison(compare: str, value: int):
    sent = -1 if value < 1 and compare.startswith("<") else 2

    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, threads=32):
            done, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(done[0], compare, value))
                for i in T.serial(4):
                    X[i] = i
                T.signal(done[0], sent)
                T.wait(arrived[0], ">=", 1)

    args = [[flags(4), flags(4)] for _ in range(2)]
    tilescale.emulate(program, args)
    assert all(found.tolist() == [0, 1, 2, 3] for _, found in args)


def test_a_queue_keeps_the_order_in_which_copies_were_started():
    """The second one overwrites the first, and its flag speaks for both."""

    @T.prim_func
    def program(X: T.Tensor((2, 4), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, threads=32):
            first, second = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X[0, :], Y, dst=1 - rank, signal=first[0])
                T.copy(X[1, :], Y, dst=1 - rank, signal=second[0])
                T.wait(second[0], ">=", 1)
                Y[0] = Y[0] + 1

    args = [[values(r, 2, 4, dtype="int32"), flags(4)] for r in range(2)]
    for seed in SEEDS:
        tilescale.emulate(program, args, schedule_seed=seed)
        for rank, (_, found) in enumerate(args):
            assert_same(found, args[1 - rank][0][1] + torch.tensor([1, 0, 0, 0]))


def test_values_of_names_are_those_when_the_copy_was_started():
    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((3, 4), "int32"), where: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                for step in T.serial(3):
                    place = where[0]
                    T.copy(X, Y[place, 0:4], dst=1 - rank, signal=arrived[0], value=step + 1)
                    where[0] = where[0] + 1
                T.wait(arrived[0], ">=", 6)

    args = [[values(r, 4, dtype="int32"), flags(3, 4), flags(1)] for r in range(2)]
    tilescale.emulate(program, args)
    for rank, (_, found, _) in enumerate(args):
        assert_same(found, args[1 - rank][0].expand(3, 4))


def test_the_call_ends_after_what_was_started():
    """No wait, and the data has arrived."""

    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=3, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size, signal=arrived[0])

    args = [[values(r, 4, dtype="int32"), flags(4)] for r in range(3)]
    tilescale.emulate(program, args)
    for rank, (_, found) in enumerate(args):
        assert_same(found, args[(rank + 2) % 3][0])


def test_a_launch_waits_for_what_another_one_has_started():
    @T.prim_func
    def program(X: T.Tensor((4, 8), "int32"), Y: T.Tensor((4, 8), "int32")):
        arrived = T.alloc_global((1,), "int32")
        with T.Kernel(device=2, threads=32):
            ready = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                arrived[0] = 0
                T.signal(ready[0], dst=1 - rank)
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(ready[0], ">=", 1))
        with T.Kernel(device=2, block=4, threads=32) as row:
            with T.Scale("block"):
                T.wait(arrived[0], ">=", 1)
                for j in T.Parallel(8):
                    Y[row, j] = Y[row, j] + 1

    args = [[values(r, 4, 8, dtype="int32"), flags(4, 8)] for r in range(2)]
    for seed in SEEDS:
        tilescale.emulate(program, args, schedule_seed=seed)
        for rank, (_, found) in enumerate(args):
            assert_same(found, args[1 - rank][0] + 1)


# -- flags of the call -------------------------------------------------------------------------------------------------


def counted():
    """In two launches each device counts in flags of the next one, and stores the values of its flags."""

    @T.prim_func
    def program(Y: T.Tensor((4,), "int64")):
        with T.Kernel(device=3, block=2, threads=32) as b:
            count = T.alloc_flags((2, 2), "int64")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(count[1, 0], dst=(rank + 1) % size)
                if b == 0:
                    T.wait(count[1, 0], ">=", 2)
                    Y[0] = count[1, 0]
                    Y[1] = count[0, 1]
        with T.Kernel(device=3, threads=32):
            again = T.alloc_flags(2)
            with T.Scale("device") as (rank, size):
                T.signal(again[0], dst=(rank + 1) % size)
                T.wait(again[0], "==", 1)
                Y[2] = T.cast(again[0], "int64")
                Y[3] = T.cast(again[1], "int64")

    return program


def test_flags_are_zero_in_every_call():
    program = counted()
    for _ in range(3):
        args = [[torch.full((4,), 9)] for _ in range(3)]
        tilescale.emulate(program, args)
        assert all(found.tolist() == [2, 0, 1, 0] for (found,) in args)


def test_flags_of_a_call_are_part_of_the_launch():
    from tilescale.hda import Machine
    from tilescale.passes.pipeline import analyse

    first, second = analyse(counted(), Machine.load("h200-sxm-8")).launches
    names = [{b.name for b in launch.buffers if b.data in launch.flags} for launch in (first, second)]
    assert names == [{"count"}, {"again"}]
