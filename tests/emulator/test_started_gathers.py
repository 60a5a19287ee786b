# SPDX-License-Identifier: MIT
"""Gathers that a device starts, of slices and along columns: arrivals, and their flags."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import WORLDS, assert_same, blank, values
from tests.halves import half_at_night
from tilescale.errors import RaceError

SEEDS = (None, 0, 1, 2)


@pytest.mark.parametrize(("dim", "chunk"), [(0, None), (1, None), (1, 8)])
def test_a_gather_of_slices_that_keep_a_leading_one(dim, chunk):
    """One layer of a stack of weights into one slot of a ring; the other slot stays as it was."""
    chunks = 1 if chunk is None else 16 // chunk

    @T.prim_func
    def program(W: T.Tensor((2, 16, 32), "float32"), whole: T.Tensor((2, 32, 32), "float32"), Y: T.Tensor((32, 32))):
        with T.Kernel(device=2, block=1, threads=128):
            arrived = T.alloc_flags((2, chunks))
            with T.Scale("device"):
                T.all_gather(W[1, 0:16, 0:32], whole[1, 0:32, 0:32], dim=dim, signal=arrived, chunk=chunk)
            with T.Scale("block"):
                tile = T.alloc((32, 32), "float32")
                for r in T.serial(2):
                    for c in T.serial(chunks):
                        T.wait(arrived[r, c], ">=", 1)
                T.copy(whole[1, 0, 0], tile)
                T.copy(tile, Y)

    per_device = [[torch.randn(2, 16, 32), torch.zeros(2, 32, 32), torch.zeros(32, 32)] for _ in range(2)]
    tilescale.emulate(program, per_device)
    wanted = torch.cat([weights[1] for weights, _, _ in per_device])
    for _, whole, y in per_device:
        assert torch.equal(y, wanted) and torch.equal(whole[1], wanted) and not whole[0].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_indices_with_an_ellipsis_are_those_of_numpy(seed: int | None):
    """Gather layers of weights, each with different flags; the last program signals a neighbour."""

    @T.prim_func
    def program(W: T.Tensor((3, 8, 4), "int32"), whole: T.Tensor((3, 16, 4), "int32"), Y: T.Tensor((3, 4), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived, done, put = T.alloc_flags((3, 2, 2)), T.alloc_flags((3, 1)), T.alloc_flags(3)
            with T.Scale("device") as (rank, size):
                for layer in T.serial(3):
                    T.all_gather(W[layer, ...], whole[layer, ...], dim=1, signal=arrived[layer, ...], chunk=4)
                T.copy(W[2, 0, ...], Y[1, ...], dst=1 - rank, signal=put[1, ...])
            with T.Scale("block"), T.Scale("device"):
                for layer in T.serial(3):
                    T.wait(arrived[layer, ...], ">=", 1)
                    T.signal(done[layer, 0, ...], dst=1 - rank)
                T.wait(done[...], ">=", 1)
                T.wait(put[1, ...], ">=", 1)

    weights = [values(r, 3, 8, 4, dtype="int32") for r in range(2)]
    args = [[own.clone(), blank(3, 16, 4, dtype="int32"), blank(3, 4, dtype="int32")] for own in weights]
    tilescale.emulate(program, args, schedule_seed=seed)
    for rank, (_, whole, y) in enumerate(args):
        assert_same(whole, torch.cat(weights, dim=1))
        assert_same(y[1], weights[1 - rank][2, 0])


def test_flags_of_layers_are_apart():
    """A wait for one layer's flags does not cover another's."""

    @T.prim_func
    def program(W: T.Tensor((2, 8, 4), "int32"), whole: T.Tensor((2, 16, 4), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived = T.alloc_flags((2, 2, 1))
            with T.Scale("device"):
                for layer in T.serial(2):
                    T.all_gather(W[layer, ...], whole[layer, ...], dim=1, signal=arrived[layer, ...])
            with T.Scale("block"):
                T.wait(arrived[0, ...], ">=", 1)
                T.copy(whole[1, 15, ...], Y)

    weights = [values(r, 2, 8, 4, dtype="int32") for r in range(2)]
    args = [[own, blank(2, 16, 4, dtype="int32"), blank(4, dtype="int32")] for own in weights]
    with pytest.raises(RaceError):
        tilescale.emulate(program, args)


# -- along columns -----------------------------------------------------------------------------------------------------

ROWS, COLUMNS, CHUNK = 6, 7, 3  # the last chunk has one column
CHUNKS = 3


def along_columns(world: int, form: str):
    """Every device gathers, or exchanges, columns; its blocks, one for each chunk, copy what has arrived into Y."""
    slots = (ROWS, world, COLUMNS)
    whole = slots if form.startswith("slots") else (ROWS, world * COLUMNS)

    @T.prim_func
    def program(X: T.Tensor((ROWS, world, COLUMNS), "int32"), Y: T.Tensor((world, ROWS, COLUMNS), "int32")):
        with T.Kernel(device=world, block=(world, CHUNKS), threads=32) as (r, c):
            given, G = T.alloc(whole, "int32", level="l2"), T.alloc(whole, "int32", level="l2")
            part, arrived = T.alloc((ROWS, COLUMNS), "int32", level="l2"), T.alloc_flags((world, CHUNKS))
            with T.Scale("device") as (rank, size):
                if form == "joined":
                    T.copy(X[:, 0, :], part)
                    T.all_gather(part, G, dim=1, signal=arrived, chunk=CHUNK)
                if form == "slots":
                    T.copy(X[:, 0, :], part)
                    T.all_gather(part, G, dim=-2, signal=arrived, chunk=CHUNK)
                if form == "joined in place":
                    T.copy(X[:, 0, :], G[:, rank * COLUMNS : (rank + 1) * COLUMNS])
                    T.all_gather(G[:, rank * COLUMNS : (rank + 1) * COLUMNS], G, dim=-1, signal=arrived, chunk=CHUNK)
                if form == "slots in place":
                    T.copy(X[:, 0, :], G[:, rank, :])
                    T.all_gather(G[:, rank, :], G, dim=1, signal=arrived, chunk=CHUNK)
                if form == "slots exchanged":
                    T.all_to_all(X, G, dim=1, signal=arrived, chunk=CHUNK)
                if form == "joined exchanged":
                    for peer in T.serial(size):
                        T.copy(X[:, peer, :], given[:, peer * COLUMNS : (peer + 1) * COLUMNS])
                    T.all_to_all(given, G, dim=1, signal=arrived, chunk=CHUNK)
            with T.Scale("block"):
                T.wait(arrived[r, c], ">=", 1)
                for i, j in T.Parallel(ROWS, CHUNK):
                    if c * CHUNK + j < COLUMNS:
                        if form.startswith("slots"):
                            Y[r, i, c * CHUNK + j] = G[i, r, c * CHUNK + j]
                        else:
                            Y[r, i, c * CHUNK + j] = G[i, r * COLUMNS + c * CHUNK + j]

    return program


@pytest.mark.parametrize(
    ("world", "form"), half_at_night(WORLDS, ["joined", "slots", "joined in place", "slots in place"])
)
def test_a_gather_along_columns(world: int, form: str):
    sent = [values(r, ROWS, world, COLUMNS, dtype="int32") for r in range(world)]
    args = [[x.clone(), blank(world, ROWS, COLUMNS, dtype="int32")] for x in sent]
    report = tilescale.emulate(along_columns(world, form), args)
    for _, found in args:
        assert_same(found, torch.stack([x[:, 0] for x in sent]))
    for did in report.activity:
        assert did.sent == did.received == (world - 1) * ROWS * COLUMNS * 4
        assert did.signals == world * CHUNKS


def test_a_part_that_has_a_name():
    """A name for a slice loads nothing, for any indices."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, COLUMNS), "int32"), G: T.Tensor((ROWS, 2 * COLUMNS), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived = T.alloc_flags((2, 1))
            with T.Scale("device") as (rank, _):
                mine = G[:, rank * COLUMNS : (rank + 1) * COLUMNS]
                T.copy(X, mine)
                T.all_gather(mine, G, dim=1, signal=arrived)
            with T.Scale("block"):
                T.wait(arrived[...], ">=", 1)

    args = [[values(r, ROWS, COLUMNS, dtype="int32"), blank(ROWS, 2 * COLUMNS, dtype="int32")] for r in range(2)]
    tilescale.emulate(program, args)
    for _, whole in args:
        assert_same(whole, torch.cat([x for x, _ in args], dim=1))


@pytest.mark.parametrize("form", ["joined exchanged", "slots exchanged"])
@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_along_columns(world: int, form: str):
    sent = [values(r, ROWS, world, COLUMNS, dtype="int32") for r in range(world)]
    args = [[x.clone(), blank(world, ROWS, COLUMNS, dtype="int32")] for x in sent]
    tilescale.emulate(along_columns(world, form), args)
    for rank, (_, found) in enumerate(args):
        assert_same(found, torch.stack([x[:, rank] for x in sent]))
