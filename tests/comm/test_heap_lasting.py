# SPDX-License-Identifier: MIT
"""Tensors that outlive the call that makes them: where they are made."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tilescale.comm.heap.lasting import lasting


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for a GPU and its streams."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: _used.append(device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(_used.append(stream)))
    _used.clear()


STREAM = SimpleNamespace(device="the device of the call")
_used: list[object] = []


def test_lasting_tensors_are_made_by_another_thread_on_the_stream_of_the_call(device: None):
    assert lasting(threading.get_ident) != threading.get_ident()
    assert _used == [STREAM.device, STREAM], "or PyTorch makes a context on another device"


def test_they_are_not_those_of_inference_mode(device: None):
    with torch.inference_mode():
        assert not lasting(lambda: torch.zeros(1)).is_inference()


def test_memory_of_a_capture_is_the_graphs(device: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert lasting(threading.get_ident) == threading.get_ident() and not _used


def test_an_error_is_that_of_the_call(device: None):
    with pytest.raises(ZeroDivisionError):
        lasting(lambda: 1 // 0)
