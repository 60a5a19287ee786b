# SPDX-License-Identifier: MIT
"""Runs without data of programs whose control flow depends on values that the caller assumes."""

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import ArgumentError, NoDataError, UsageError

ROWS, COLUMNS = 64, 256


def counted(devices: int):
    """Send from each device a number of tiles by its count, computed into a workspace from arguments."""

    @T.prim_func
    def counted(X: T.Tensor((ROWS * 16, COLUMNS), "float32"), N: T.Tensor((4,), "int32")):
        with T.Kernel(device=devices, block=4, threads=128) as b:
            whole = T.alloc((4,), "int32", level="l2")
            inbox = T.alloc((ROWS, COLUMNS), "float32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((ROWS, COLUMNS), "float32")
                whole[b] = 2 * N[b]
                with T.Scale("device") as (rank, size):
                    for n in T.serial(N[b]):
                        T.copy(X[n * ROWS, 0], tile)
                    if whole[b] > 4:
                        T.copy(tile, inbox, dst=(rank + 1) % size)

    return counted


def times(devices: int, **assume) -> float:
    return tilescale.emulate(counted(devices), data=False, assume=assume).time_us


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_control_flow_follows_assumed_values(devices):
    none, few, many = (times(devices, N=n, whole=0) for n in (0, 2, 16))
    assert none < few < many
    assert times(devices, N=2, whole=0) == times(devices, N=torch.full((4,), 2), whole=np.zeros(4, np.int32))
    assert times(devices, N=16, whole=5) > many


def test_units_may_have_values_of_their_own():
    slow = times(3, N=16, whole=0)
    assert times(3, N=[0, 16, 2], whole=0) == pytest.approx(slow, rel=0.05)
    assert times(3, N=[0, torch.tensor([0, 1, 0, 0]), 2], whole=0) < slow / 2


def test_the_emulation_with_data_takes_the_same_time():
    counts = torch.tensor([0, 3, 7, 1], dtype=torch.int32)
    args = [[torch.zeros(ROWS * 16, COLUMNS), counts.clone()] for _ in range(2)]
    with_data = tilescale.emulate(counted(2), args, check="none").time_us
    assert times(2, N=counts, whole=2 * counts) == pytest.approx(with_data, rel=1e-6)


def test_without_an_assumption_the_error_names_it():
    with pytest.raises(NoDataError, match="'N'") as raised:
        times(2)
    assert "assume={'N': values}" in str(raised.value)
    with pytest.raises(NoDataError, match="'whole'") as raised:
        times(2, N=1)
    assert any("test_assumptions.py" in place.file for place in raised.value.where)


def test_wrong_assumptions_are_errors():
    with pytest.raises(UsageError, match="no such tensor") as raised:
        times(2, n=3)
    assert "N" in str(raised.value.hint)
    with pytest.raises(ArgumentError, match=r"shape \(3,\)"):
        times(2, N=torch.zeros(3), whole=0)
    with pytest.raises(ArgumentError, match="list of 3, the launch has 2 units"):
        times(2, N=[1, 2, 3], whole=0)
    with pytest.raises(UsageError, match="str"):
        times(2, N="two", whole=0)
    with pytest.raises(UsageError, match="run with data"):
        args = [torch.zeros(ROWS * 16, COLUMNS), torch.zeros(4, dtype=torch.int32)]
        tilescale.emulate(counted(1), args, assume={"N": 1})


def test_unequal_parts_take_the_time_of_the_assumed_counts():
    @T.prim_func
    def exchange(X: T.Tensor((4096, 1024), "float32"), Y: T.Tensor((8192, 1024), "float32"), N: T.Tensor(2, "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, N)

    few, many = (tilescale.emulate(exchange, data=False, assume={"N": n}) for n in (8, 2048))
    assert few.time_us < many.time_us / 4
    assert few.activity[0].contributed == 16 * 4096
