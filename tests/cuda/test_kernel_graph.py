# SPDX-License-Identifier: MIT
"""Kernels of one device in recorded calls: their launch as a graph, for tensors at any addresses."""

import itertools
from typing import Any

import pytest
import torch

from tests.cuda.fakes import Device, record_on_cpu
from tests.cuda.test_gemm_graph import Counted, drawn
from tilescale.backends.cuda.running import kernel_graph
from tilescale.backends.cuda.running.repeated import call_kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    record_on_cpu(monkeypatch)
    return Device(monkeypatch)


def test_a_kernel_is_a_part_of_a_recorded_call_and_launched_once_in_each(device: Device):
    def kernel(x: torch.Tensor, scale: int, made: torch.Tensor) -> None:
        device._launched("kernel", x, scale, made)

    def twice(x: torch.Tensor) -> torch.Tensor:
        between, made = torch.empty_like(x), torch.empty_like(x)
        call_kernel(kernel, x, 2, between)
        call_kernel(kernel, between, 3, made)
        return made

    function, replayed = Counted(twice), 0
    for x in [drawn() for _ in range(40)]:
        device.names()
        made = function.is_replayed(x)
        launches = device.names()
        if made is None:
            assert launches in (["kernel"] * 2, ["replay"] * 2)
            continue
        replayed += 1
        assert launches == ["replay"], "no step of PyTorch's is between them"
        (first, two, between), (second, three, last) = device.replayed[-1]
        assert (first, two, second, three, last) == (x.data_ptr(), 2, between, 3, made.data_ptr())
    assert replayed > 20


@pytest.mark.parametrize("why", ["it does nothing", "it depends on more than addresses", "no capture"])
def test_other_kernels_are_called_and_the_call_is_not_recorded(
    device: Device, why: str, monkeypatch: pytest.MonkeyPatch
):
    count = itertools.count()

    def refused(*given: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def called(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        call_kernel(lambda *at: device._launched("kernel", *at, next(count)), x, made)
        return made

    if why == "no capture":
        monkeypatch.setattr(kernel_graph, "captured", refused)
    function = Counted(called)
    for x in [drawn() for _ in range(20)]:
        function.repeated(x[:0] if why == "it does nothing" else x)
    assert function.calls == 20 and device.names() == ["kernel"] * 20
