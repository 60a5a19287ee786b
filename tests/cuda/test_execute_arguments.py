# SPDX-License-Identifier: MIT
"""Checks of a program's arguments on a GPU: those of the emulator, with the same texts, when a plan is made."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.fakes import Device
from tests.cuda.test_execute_calls import put, scaled
from tests.cuda.test_where_devices_synchronize import on_tensors, reduced
from tilescale.backends.cuda.running.plans import CallPlans
from tilescale.errors import ArgumentError
from tilescale.program.arguments import check_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def right() -> list[Any]:
    return [torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)]


WRONG = {
    "type": torch.zeros(64, 64, dtype=torch.float16),
    "shape": torch.zeros(64, 63),
    "dimensions": torch.zeros(64),
    "elsewhere": torch.zeros(64, 64, device="meta"),
    "numpy": np.zeros((64, 64), np.float32),
    "list": [[0.0] * 64] * 64,
    "nothing": None,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_program_of_collectives_takes_what_it_declares(device: Device, wrong: Any):
    """The host makes them all, so no kernel would look."""
    func = on_tensors(reduced)
    own, given = device.program(func), [wrong, *right()[1:]]
    assert not own.again(tuple(given))
    with pytest.raises(ArgumentError) as found:
        own(given)
    assert device.names() == []
    with pytest.raises(ArgumentError) as emulated:
        tilescale.emulate(func, [given, right()])
    assert (found.value.message, found.value.hint) == (emulated.value.message, emulated.value.hint)
    assert "arguments of device 0: 'X' " in found.value.message


def test_a_call_goes_on_after_a_mistake_that_no_launch_followed(device: Device):
    own = device.program(on_tensors(reduced))
    with pytest.raises(ArgumentError):
        own([torch.zeros(3, 64), *right()[1:]])
    assert not device.guard.stopped
    own(right())
    assert device.names()


def test_extents_have_to_follow_and_to_agree(device: Device):
    n = T.dynamic("n")

    @T.prim_func
    def added(X: T.Tensor((n, 64), "float32"), Y: T.Tensor((n, 64), "float32")):
        with T.Kernel(device=2):
            with T.Scale("device"):
                T.allreduce(X)
                T.allreduce(Y)

    own = device.program(added)
    with pytest.raises(ArgumentError, match=r"'Y' has shape \(2, 64\)"):
        own([torch.zeros(3, 64), torch.zeros(2, 64)])


def test_a_tensor_on_another_device_has_no_plan_of_one_here(device: Device):
    own = device.program(put())
    x, y = (device.heap.zeros((64, 64), torch.float32) for _ in range(2))
    own([x, y])
    with pytest.raises(ArgumentError, match="'X' is on meta, this program runs on cpu"):
        own([torch.empty(64, 64, device="meta"), y])


class OnFirstGpu(torch.Tensor):
    """A tensor that says so."""

    device = torch.device("cuda:0")


class OnSecondGpu(torch.Tensor):
    """A tensor that says so."""

    device = torch.device("cuda:1")


def test_a_tensor_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    kernel = tilescale.compile(on_tensors(reduced))
    first = kernel.program.parameters[0]
    monkeypatch.setattr(type(kernel), "_executable", SimpleNamespace(device="cuda:1"))
    assert kernel.device == "cuda"
    check_device(first, torch.zeros(64, 64).as_subclass(OnSecondGpu), kernel._place)
    with pytest.raises(ArgumentError, match="'X' is on cuda:0, this program runs on cuda:1") as found:
        check_device(first, torch.zeros(64, 64).as_subclass(OnFirstGpu), kernel._place)
    assert found.value.hint == "pass a CUDA tensor: x.to('cuda:1')"


def test_what_no_program_takes_has_no_form():
    arguments_of = CallPlans(lambda: False).arguments_of
    for wrong in (np.zeros(3), [1], ([1],), "x", object()):
        assert arguments_of([torch.zeros(3), wrong]) is None
    for right_ in (None, 1, 1.5, True, np.int64(3)):
        assert hash(arguments_of([torch.zeros(3), right_]))


def test_a_copy_stands_for_an_argument_of_the_calls_of_a_graph(device: Device):
    own = device.program(scaled())
    x, passed = torch.ones(64, 64), []
    device.on_launch = lambda name, *args: passed.append(args[-1].mul_(3))
    for step in own._bind(own._plan([x, 0])[0].known, [x, 0], {0}):
        step()
    assert x.eq(27).all() and len({made.data_ptr() for made in passed} - {x.data_ptr()}) == 1


def test_copies_of_arguments_of_one_size_have_one_address(device: Device):
    """Graphs are bound to it: larger arguments change nothing."""
    memory, x = device.program(scaled()).memory, torch.zeros(64, 64)
    small, same, halves = (memory.copy_of(0, t) for t in (x[:8], x[:3], x[:4].bfloat16()))
    assert (same.shape, halves.shape, halves.dtype) == ((3, 64), (4, 64), torch.bfloat16)
    large, twice, other = memory.copy_of(0, x[:9]), memory.copy_of(0, x[:16]), memory.copy_of(1, x[:3])
    assert large.data_ptr() == twice.data_ptr() and large.shape == (9, 64)
    again = memory.copy_of(0, x[:8])
    assert small.data_ptr() == same.data_ptr() == halves.data_ptr() == again.data_ptr()
    assert len({small.data_ptr(), large.data_ptr(), other.data_ptr()}) == 3
