# SPDX-License-Identifier: MIT
"""Calls that differ in where their tensors lie: what is bound anew, and what is not."""

import pytest
import torch

from tests.cuda.fakes import Device
from tests.cuda.test_execute_calls import on_tensors, put, reduced


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def test_a_call_with_tensors_elsewhere_takes_the_launches_of_the_call_before(device: Device, monkeypatch):
    own = device.program(put())
    x, y, other = (device.heap.zeros((64, 64), torch.float32) for _ in range(3))
    own([x, y])
    (first,) = device.log
    device.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(own, "_steps", None)  # nothing is bound: only the kernel takes X
        own([other, y])
    (second,) = device.log
    places = [[t.data_ptr() for t in entry if torch.is_tensor(t)] for entry in (first, second)]
    assert [other.data_ptr() if p == x.data_ptr() else p for p in places[0]] == places[1] != places[0]
    with pytest.raises(TypeError):
        monkeypatch.setattr(own, "_steps", None)
        own([x, other])  # peers reach Y


def test_operations_of_the_host_are_bound_to_where_tensors_lie(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(on_tensors(reduced))
    given = [torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)]
    own(given)
    monkeypatch.setattr(own, "_steps", None)
    with pytest.raises(TypeError):
        own([torch.zeros(64, 64), *given[1:]])
