# SPDX-License-Identifier: MIT
"""Races between devices: every fault is found at its two lines, and its correct twin stays silent, in every order."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import SEEDS, in_every_order, line_of, race, tensors
from tilescale.errors import DeadlockError, RaceError

WORLDS = (2, 3, 4, 8)


# -- a put and its signal ----------------------------------------------------------------------------------------------


def put(fault, devices, result=False):
    """Each device puts a tile to its right neighbour, which reads it; and keeps it in X, if there is a `result`."""

    @T.prim_func
    def program(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((16, 16), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=devices, block=1, threads=128):
            with T.Scale("block"):
                tile = T.alloc((16, 16), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    if fault == "signal before the data":
                        T.signal(F[0], dst=(rank + 1) % size)
                    if fault == "wait on the wrong flag":
                        T.signal(F[1], dst=(rank + size - 1) % size)
                    T.copy(tile, Y, dst=(rank + 1) % size)  # put
                    if fault not in ("signal before the data", "missing signal"):
                        T.signal(F[0], dst=(rank + 1) % size)
                if fault == "wait on the wrong flag":
                    T.wait(F[1], ">=", 1)
                elif fault == "wait for too small a count":
                    T.wait(F[0], ">=", 0)
                elif fault not in ("read without wait", "missing signal"):
                    T.wait(F[0], ">=", 1)
                T.copy(Y, tile)  # get
                if result:
                    T.copy(tile, X)

    return program


def put_args(devices):
    return tensors(devices, (16, 16), (16, 16), (2,))


PUT_FAULTS = [
    "missing signal",
    "signal before the data",
    "wait on the wrong flag",
    "wait for too small a count",
    "read without wait",
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_faults_of_a_put_in_every_order(fault, seed):
    race(put(fault, 3), put_args(3), "put", "get", seed=seed)


def test_a_signal_before_the_data_shows_without_checks():
    """In the default order all have put when the first one reads. A device may be overtaken after its signal."""
    got = {}
    for fault in ("signal before the data", None):
        for seed in (None, 0, *range(1, 9)):
            args = put_args(2)
            args[0][1][:] = args[1][1][:] = -1.0
            tilescale.emulate(put(fault, 2, result=True), args, check="none", schedule_seed=seed)
            got[fault, seed] = [tensors[0][0, 0].item() for tensors in args]
    assert all(values == [1.0, 0.0] for (fault, seed), values in got.items() if fault is None or seed is None)
    assert -1.0 in got["signal before the data", 0]
    assert any(-1.0 in got["signal before the data", seed] for seed in range(1, 9))


@pytest.mark.parametrize("devices", WORLDS)
@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_faults_of_a_put_at_every_size(fault, devices):
    error = race(put(fault, devices), put_args(devices), "put", "get")
    assert "Y[0:16, 0:16] of device " in error.message
    assert "no happens-before between them" in error.message
    assert 'T.barrier() in T.Scale("device")' in error.hint and "T.signal(flag[i], dst=peer)" in error.hint


@pytest.mark.parametrize("devices", WORLDS)
def test_a_put_with_its_signal_is_silent(devices):
    in_every_order(put(None, devices), lambda: put_args(devices))


@pytest.mark.usefixtures("remedies")
def test_the_report_of_a_missing_wait():
    error = race(put("read without wait", 2), put_args(2), "put", "get")
    assert error.message == (
        "Y[0:16, 0:16] of device 0: device 0, block 0 reads it and device 1, block 0 writes it, "
        "with no happens-before between them"
    )
    assert error.hint.startswith(f'add T.wait(F[0], ">=", 1) before line {line_of("get")};')
    assert error.hint.endswith(
        f"in general: order line {line_of('get')} and line {line_of('put')}: T.signal(flag[i], dst=peer), or "
        "signal=flag[i] on its T.copy, after the one and T.wait(flag[i], ...) before the other; or T.barrier() in "
        'T.Scale("device")'
    )


def test_the_report_names_the_flags_around_the_accesses():
    error = race(put("wait on the wrong flag", 3), put_args(3), "put", "get")
    assert error.message == (
        "Y[0:16, 0:16] of device 0: device 2, block 0 writes it and device 0, block 0 reads it, "
        "with no happens-before between them\n"
        f"  device 2, block 0 signals F[0] after that (line {line_of('put') + 2})\n"
        f"  device 0, block 0 waited last for F[1] (line {line_of('put') + 4})"
    )
    assert f"between line {line_of('put')} and line {line_of('get')}: T.signal(flag[i], dst=peer)" in error.hint


def test_the_report_names_the_flag_that_came_too_early():
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), F: T.Tensor((3,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(F[0], dst=1 - rank)  # early
                T.copy(X, Y, dst=1 - rank)  # late data
                T.signal(F[1], dst=1 - rank)
                T.wait(F[1], ">=", 0)
                T.wait(F[0], ">=", 1)  # trusts
                T.wait(F[2], ">=", 0)
                T.copy(Y, X)  # use

    error = race(program, tensors(2, (8, 8), (8, 8), (3,)), "late data", "use")
    assert f"device 1, block 0 signals F[0] before that (line {line_of('early')})" in error.message
    assert f"device 0, block 0 waited for F[0] (line {line_of('trusts')})" in error.message
    early = f"F[0] is signalled (line {line_of('early')}) before line {line_of('late data')} writes, and does not order"
    assert early in error.hint


# -- counts ------------------------------------------------------------------------------------------------------------


def gather(devices, count):
    """Every device sends its part to all; each reads all parts when `count` have been counted."""

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((devices, 8, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((8, 8), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        T.copy(tile, Y[rank, 0, 0], dst=(rank + step) % size, signal=F[0])  # send
                T.wait(F[0], ">=", count)
                for part in T.serial(devices):
                    T.copy(Y[part, 0, 0], tile)  # receive

    return program


def gather_args(devices):
    return tensors(devices, (8, 8), (devices, 8, 8), (1,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("devices", WORLDS)
def test_a_count_that_is_one_too_small(devices, seed):
    race(gather(devices, devices - 1), gather_args(devices), "send", "receive", seed=seed)


@pytest.mark.parametrize("devices", WORLDS)
def test_a_count_of_all_is_silent(devices):
    in_every_order(gather(devices, devices), lambda: gather_args(devices))


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_a_wait_for_any_of_two_signals_orders_neither(reader):
    """A device waits for one signal and reads what another one sent: in another run that of the third comes first.

    It waits as long as others can go on, so it sees that there are two. A wait for both on another flag orders them,
    independently of the first wait.
    """

    def program(count, both):
        @T.prim_func
        def program(Y: T.Tensor((3, 8), "float32"), F: T.Tensor((1,), "int32"), G: T.Tensor((1,), "int32")):
            with T.Kernel(device=3, block=1, threads=32):
                with T.Scale("block"):
                    tile = T.alloc((8,), "float32")
                    T.clear(tile)
                    with T.Scale("device") as (rank, size):
                        if rank != reader:
                            T.copy(tile, Y[rank, 0], dst=reader, signal=F[0])  # either
                            T.signal(G[0], dst=reader)
                        else:
                            if both:
                                T.wait(G[0], ">", 1)
                            T.wait(F[0], ">=", count)
                            T.copy(Y[(reader + 1) % 3, 0], tile)  # the next one's

        return program

    def args():
        return tensors(3, (3, 8), (1,), (1,))

    race(program(1, False), args(), "either", "the next one's")
    for count, both in ((2, False), (2, True), (1, True)):
        in_every_order(program(count, both), args)


# -- buffers that are used again ---------------------------------------------------------------------------------------


def ring(devices, buffers, credit):
    """Tiles travel round a ring through `buffers` inboxes; a sender may be `credit` tiles ahead."""

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=devices, block=1, threads=64):
            inbox = T.alloc((buffers, 8, 8), "float32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((8, 8), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(6):
                        T.wait(F[1], ">=", step - credit + 1)
                        T.copy(tile, inbox[step % buffers, 0, 0], dst=(rank + 1) % size, signal=F[0])  # fill
                        T.wait(F[0], ">=", step + 1)
                        T.copy(inbox[step % buffers, 0, 0], tile)  # empty
                        T.signal(F[1], dst=(rank + size - 1) % size)

    return program


@pytest.mark.parametrize("devices", [5, 8])  # in a smaller ring what has come round is order enough
@pytest.mark.parametrize(("buffers", "credit"), [(1, 2), (2, 3), (1, 6), (3, 4)])
def test_one_buffer_too_few(devices, buffers, credit):
    error = race(ring(devices, buffers, credit), tensors(devices, (8, 8), (2,)), "fill", "empty")
    fill, empty = f"line {line_of('fill')}", f"line {line_of('empty')}"
    assert f"{fill} reuses the buffer before {empty} has finished with it" in error.hint
    assert f"T.signal(free[i], dst=peer) after {empty} and T.wait(free[i], ...) before {fill}" in error.hint


@pytest.mark.parametrize("devices", WORLDS)
@pytest.mark.parametrize(("buffers", "credit"), [(1, 1), (2, 2), (2, 1), (3, 3)])
def test_enough_buffers_are_silent(devices, buffers, credit):
    in_every_order(ring(devices, buffers, credit), lambda: tensors(devices, (8, 8), (2,)))


def steps(devices, barrier):
    """Neighbours exchange tiles again and again through one buffer."""

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((8, 8), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    for _ in T.serial(3):
                        T.copy(tile, Y, dst=(rank + 1) % size)  # again
                        T.barrier()
                        T.copy(Y, tile)  # before
                        if barrier:
                            T.barrier()

    return program


@pytest.mark.parametrize("devices", WORLDS)
def test_a_buffer_that_is_used_again_without_a_barrier(devices):
    error = race(steps(devices, False), tensors(devices, (8, 8), (8, 8)), "again", "before")
    assert devices == 1 or "reuses the buffer" in error.hint
    in_every_order(steps(devices, True), lambda: tensors(devices, (8, 8), (8, 8)))


# -- flags and atomics -------------------------------------------------------------------------------------------------


def counter(plain, barrier=False):
    """Every device counts itself at device 0, which sets the counter to zero at the beginning."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    if rank == 0:
                        if plain:
                            F[0] = 0  # plainly
                        else:
                            T.atomic_store(F[0], 0, memory_order="release")
                    if barrier:
                        T.barrier()
                    T.signal(F[0], dst=0)  # counts

    return program


@pytest.mark.varies
def test_a_flag_that_is_cleared_while_others_signal():
    with pytest.raises(RaceError) as caught:
        tilescale.emulate(counter(plain=True), tensors(4, (1,)))
    found = {(w.line, w.what) for w in caught.value.where}
    assert found == {(line_of("plainly"), "writes here"), (line_of("counts"), "atomically updates here")}
    assert caught.value.hint.endswith("or make both atomic")
    in_every_order(counter(plain=True, barrier=True), lambda: tensors(4, (1,)))
    in_every_order(counter(plain=False), lambda: tensors(4, (1,)))


@pytest.mark.parametrize("first", ["narrow", "wide"])
def test_atomics_of_different_widths(first):
    @T.prim_func
    def program(C: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=2, threads=1) as b:
            wide = T.view(C, (1,), "int64")
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if b == (0 if first == "narrow" else 1):
                    T.signal(C[1], dst=1 - rank)  # narrow
                else:
                    T.signal(wide[0], dst=1 - rank)  # wide

    error = race(program, tensors(2, (2,)), "narrow", "wide")
    assert error.hint.endswith("; or use one type for both: atomics of different widths are not atomic with each other")


def test_devices_that_were_given_the_same_tensor():
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=3, block=1, threads=32):
            T.clear(X)  # its own, it believes

    x = torch.zeros(8, 8)
    error = race(program, [[x], [torch.zeros(8, 8)], [x]], "its own, it believes")
    assert error.message.splitlines()[1] == "  device 0; device 2 were given the same tensor"
    assert error.hint == "pass a tensor of its own for each of them"
    tilescale.emulate(program, [[t] for t in torch.zeros(3, 8, 8)])
    tilescale.emulate(program, [[t] for t in torch.zeros(8, 24).chunk(3, 1)])


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def skipping(skip):
    """A barrier between writing and reading that one rank jumps over; another kind of order lets it run to its end."""

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((8, 8), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y, dst=(rank + 1) % size)
                    if S[0] == 0:
                        T.barrier()
                T.copy(Y, tile)

    args = tensors(3, (8, 8), (8, 8), (1,))
    if skip:
        args[1][2][0] = 1
    return program, args


def test_a_barrier_that_one_rank_skips():
    program, args = skipping(True)
    with pytest.raises((RaceError, DeadlockError)):
        tilescale.emulate(program, args)
    with pytest.raises(DeadlockError, match="did not reach it"):
        tilescale.emulate(*skipping(True), check="none")
    in_every_order(skipping(False)[0], lambda: skipping(False)[1])


def test_a_device_that_does_something_else_than_the_others():
    """Rank 1 was meant to wait like the rest: the programs of the ranks differ in a private value."""

    @T.prim_func
    def program(Y: T.Tensor((8, 8), "float32"), F: T.Tensor((1,), "int32"), waits: T.int32):
        with T.Kernel(device=3, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((8, 8), "float32")
                T.clear(tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y, dst=(rank + 1) % size, signal=F[0])  # to the right
                    if waits == 1:
                        T.wait(F[0], ">=", 1)
                    T.copy(Y, tile)  # there

    args = tensors(3, (8, 8), (1,))
    error = race(program, [[*a, int(r != 1)] for r, a in enumerate(args)], "to the right", "there")
    assert "of device 1" in error.message
    tilescale.emulate(program, [[*a, 1] for a in tensors(3, (8, 8), (1,))])
