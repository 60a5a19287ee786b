# SPDX-License-Identifier: MIT
"""Misuse of asynchronous operations: where none can be started, and with tensors and flags that do not fit."""

import pytest

import tilescale.language as T
from tests.language.support import on_devices
from tilescale.errors import CollectiveNotReachedError, PhaseError, ShapeError, UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.runtime.schedule_text import describe


def started(statements, devices: int = 4):
    """Traces the macro `statements(X, Y, G, flags, rank)` in a device phase.

    X (64, 32) and Y (64, 32), float32, are tensors of each device, G (4, 64, 32) too; flags (4, 4) are the call's.
    """

    @T.prim_func
    def f(
        X: T.Tensor((64, 32), "float32"),
        Y: T.Tensor((64, 32), "float32"),
        G: T.Tensor((4, 64, 32), "float32"),
        half: T.Tensor((64, 32), "float16"),
        number: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(device=devices, block=8, threads=128):
            flags = T.alloc_flags((4, 4))
            with T.Scale("device") as (rank, _):
                statements(X, Y, G, half, number, flags, rank)

    return f


# -- copies ------------------------------------------------------------------------------------------------------------


def test_after_in_a_block(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, signal=flags[0], after=(flags[1], ">=", 1))  # <-

    with mistake(UsageError, "T.copy(after=) where a block executes", "a device starts", "T.wait(flag, compare"):
        on_devices(wrong)


@pytest.mark.parametrize("keywords", [{"dst": 1}, {"src": 1}])
def test_after_without_a_signal(mistake, keywords):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, after=(flags[0, 0], ">=", 1), **keywords)  # <-

    with mistake(UsageError, "after=", "can be signalled"):
        started(wrong)


@pytest.mark.parametrize("after", [1, (1, 2), "done"])
def test_after_what_is_no_condition(mistake, after):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, dst=1, signal=flags[0, 0], after=after)  # <-

    with mistake(UsageError, "a flag, a comparison and a value", 'after=(flags[i], ">=", value)'):
        started(wrong)


def test_after_an_unknown_comparison(mistake):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, dst=1, signal=flags[0, 0], after=(flags[0, 1], "=>", 1))  # <-

    with mistake(UsageError, "after=(flag, '=>', value)", "==, !=, >=", 'after=(flag, ">=", value)'):
        started(wrong)


def test_after_what_is_no_flag(mistake):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, dst=1, signal=flags[0, 0], after=(X[0, 0], ">=", 1))  # <-

    with mistake(UsageError, "a flag is an integer, 'X' is float32"):
        started(wrong)


def test_after_by_what_programs_start(mistake):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, dst=1, signal=flags[0, 0], after=(flags[0, 1], ">=", 1), impl="lsu")  # <-

    with mistake(UsageError, "lsu is started by programs", "leave impl out"):
        started(wrong)


def test_a_conversion_on_the_way(mistake):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.copy(X, half, dst=1, signal=flags[0, 0])  # <-

    with mistake(UsageError, "from 'X', float32, to 'half', float16", "converts nothing"):
        started(wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda X, Y, number, flags: T.copy(X, Y, dst=number[0], signal=flags[0, 0]),
        lambda X, Y, number, flags: T.copy(X, Y, dst=1, signal=flags[0, 0], value=number[0]),
        lambda X, Y, number, flags: T.copy(X, Y, dst=1, signal=flags[number[0], 0]),
        lambda X, Y, number, flags: T.all_gather(X[0:16, ...], Y, signal=flags[0:4, number[0] : number[0] + 1]),
        lambda X, Y, number, flags: T.copy(X[number[0], :], Y[0, :], dst=1, signal=flags[0, 0]),
        lambda X, Y, number, flags: T.copy(
            X, Y, dst=1, signal=flags[0, 0], after=(flags[0, 1], ">=", number[0])
        ),
    ],
)
def test_what_is_only_known_from_memory(mistake, call):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        call(X, Y, number, flags)  # <-

    with mistake(UsageError, "number[0] is read from memory", "into a name of its own"):
        started(wrong)


# -- gathers -----------------------------------------------------------------------------------------------------------


def test_a_gather_with_flags_in_a_block(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.all_gather(tile[0:16, :], X, signal=flags)  # <-

    with mistake(PhaseError, "T.all_gather(signal=) where a block executes", "T.Scale('device')"):
        on_devices(wrong)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda X, G, flags: T.all_gather(X, G, chunk=16), "T.all_gather(chunk=) without signal"),
        (lambda X, G, flags: T.all_gather(X, signal=flags), "T.all_gather(signal=) without dst"),
        (lambda X, G, flags: T.all_gather(X, G, signal=flags, chunk=0), "chunk=0): a chunk is a positive number"),
        (lambda X, G, flags: T.all_gather(X, G, signal=flags, chunk="all"), "chunk='all'): a chunk is a positive"),
        (lambda X, G, flags: T.all_gather(X, G, signal=flags[0, 0], chunk=16), "its flags are a tensor"),
        (lambda X, G, flags: T.copy(X, G[0, ...], dst=1, signal=flags[0, ...]), "is one element of a tensor in device"),
        (lambda X, G, flags: T.signal(flags[0, ...]), "is one element of a tensor in device memory, got flags[0, 0:4]"),
        (lambda X, G, flags: T.all_gather(X, G, signal=X), "a flag is an integer, 'X' is float32"),
        (lambda X, G, flags: T.all_gather(X, G, signal=flags, chunk=16, impl="ring"), "impl='ring' is not a mechanism"),
        (lambda X, G, flags: T.all_to_all(G, G, chunk=16), "T.all_to_all(chunk=) without signal"),
        (lambda X, G, flags: T.all_to_all(G, G, signal=flags, chunk=16), "'G' in its own place"),
    ],
)
def test_arguments_of_a_collective(mistake, call, text: str):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        call(X, G, flags)  # <-

    with mistake(UsageError, text):
        started(wrong)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda X, Y, G, f: T.all_gather(X, Y, signal=f, chunk=16), "the whole of such parts is (256, 32)"),
        (lambda X, Y, G, f: T.all_gather(X[0:32, :], G, signal=f), "the whole of such parts is (4, 32, 32)"),
        (lambda X, Y, G, f: T.all_gather(X, G, signal=f, chunk=16, dim=1), "along dimension 1: the whole"),
        (lambda X, Y, G, f: T.all_gather(X, Y, signal=f, dim=-1), "the whole of such parts is (64, 128)"),
        (lambda X, Y, G, f: T.all_gather(X, Y, signal=f, dim=2), "dim=2) of a tensor with 2 dimensions"),
        (lambda X, Y, G, f: T.all_to_all(X[:, 0:30], Y[:, 0:30], dim=1, signal=f), "dimension 1, a multiple of 4"),
        (lambda X, Y, G, f: T.all_to_all(X, G, signal=f), "from (64, 32) to (4, 64, 32)"),
        (lambda X, Y, G, f: T.all_to_all(X[0:62, :], Y[0:62, :], signal=f), "dimension 0, a multiple of 4"),
        (lambda X, Y, G, f: T.all_gather(X, G[0:3, :, :], signal=f), "the whole is (3, 64, 32), a part (64, 32)"),
        (lambda X, Y, G, f: T.all_gather(X, G, signal=f), "are (4, 1): 4 units, whole parts"),
        (lambda X, Y, G, f: T.all_gather(X, G, signal=f[0, ...], chunk=16), "the flags are (1, 4)"),
        (lambda X, Y, G, f: T.all_gather(X, G, signal=f, chunk=15), "are (4, 5): 4 units, 64 rows in chunks of 15"),
    ],
)
def test_shapes_of_a_collective(mistake, call, text: str):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        call(X, Y, G, flags)  # <-

    with mistake(ShapeError, text):
        started(wrong)


@pytest.mark.parametrize(
    "part",
    [
        lambda G, rank: G[0, 0:64, :],
        lambda G, rank: G[(rank + 1) % 4, 0:64, :],
    ],
)
def test_in_place_from_another_place(mistake, part):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        T.all_gather(part(G, rank), G, signal=flags, chunk=16)  # <-

    with mistake(UsageError, "where it is not this unit's own", "G[rank, 0:64, :]"):
        started(wrong)


def test_in_place_through_a_name():
    @T.macro
    def right(X, Y, G, half, number, flags, rank):
        mine = rank + 0
        T.all_gather(G[mine, 0:64, :], G, signal=flags, chunk=16)

    started(right)


def test_a_gather_under_a_condition_on_the_rank(mistake):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        if rank == 0:
            T.all_gather(X, G, signal=flags, chunk=16)  # <-

    with mistake(CollectiveNotReachedError, "not all units reach it"):
        started(wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda X, Y, flags: T.allreduce(X, signal=flags),
        lambda X, Y, flags: T.reduce_scatter(X, Y, signal=flags, chunk=16),
        lambda X, Y, flags: T.broadcast(X, signal=flags),
    ],
)
def test_other_collectives_are_done_in_order(mistake, call):
    @T.macro
    def wrong(X, Y, G, half, number, flags, rank):
        call(X, Y, flags)  # <-

    with mistake(UsageError, "only T.all_gather and T.all_to_all can be started"):
        started(wrong)


# -- flags -------------------------------------------------------------------------------------------------------------


def test_flags_that_are_no_integers(mistake):
    with mistake(UsageError, "T.alloc_flags(dtype='float32'): a flag is an integer"):

        @T.prim_func
        def f(X: T.Tensor((4,), "float32")):
            with T.Kernel(device=2, threads=32):
                T.alloc_flags((4,), "float32")  # <-


def test_flags_outside_a_launch(mistake):
    with mistake(UsageError, "T.alloc_flags needs a launch around it"):

        @T.prim_func
        def f(X: T.Tensor((4,), "float32")):
            flags = T.alloc_flags((4,))  # <-
            with T.Kernel(device=2, threads=32):
                T.signal(flags[0])


def test_the_schedule_says_what_is_started():
    @T.macro
    def right(X, Y, G, half, number, flags, rank):
        T.copy(X, Y, dst=1, signal=flags[0, 0], after=(flags[1, 0], ">=", 4))
        T.all_gather(X, G, signal=flags, chunk=16)
        T.barrier()

    machine = Machine.load("h200-sxm-8")
    text = describe(analyse(started(right), machine), machine)
    assert "start copy(X, Y) between devices asynchronously after flags >= 4, signals flags" in text
    assert "start all_gather(X, G) between devices asynchronously, signals flags" in text
    assert ", barrier() between devices" in text
