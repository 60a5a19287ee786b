# SPDX-License-Identifier: MIT
"""GEMMs of PyTorch in recorded calls: their launch as a graph, for tensors at any addresses."""

from typing import Any

import pytest
import torch

from tests.cuda.fakes import Device, aligned, record_on_cpu
from tilescale.backends.cuda.running import gemm_graph, recording
from tilescale.backends.cuda.running.repeated import TRIED, RecordedCalls

ENOUGH = TRIED[2] + 1
_aten = torch.ops.aten


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """One whose GEMMs are kernels that take the addresses of their tensors."""
    record_on_cpu(monkeypatch)
    device = Device(monkeypatch)

    def launched(*given: Any, out: torch.Tensor, **named: Any) -> None:
        device._launched("gemm", *given, out)

    gemms = dict.fromkeys((_aten.mm.default, _aten.mm.out, _aten.addmm.default), launched)
    for module in gemm_graph, recording:
        monkeypatch.setattr(module, "GEMMS", gemms)
    return device


def drawn() -> torch.Tensor:
    """A matrix where a GPU's allocator would put it."""
    return aligned(64, 32).view(torch.bfloat16).copy_(torch.randn(64, 64))


class Counted:
    """Calls of a function, and those of them that are not replayed."""

    def __init__(self, function: Any):
        self._function, self.calls = function, 0
        self.repeated = RecordedCalls(self._call)

    def _call(self, *given: Any) -> Any:
        self.calls += 1
        return self._function(*given)

    def is_replayed(self, *given: Any) -> Any:
        """The result of a replayed call; None for others."""
        calls, made = self.calls, self.repeated(*given)
        return made if self.calls == calls else None


def pairs(count: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Arguments of calls, all at once, so that none is where another one was."""
    return [(drawn(), drawn().t()) for _ in range(count)]


def test_a_recorded_gemm_is_a_launch_with_the_addresses_of_each_call(device: Device):
    function, replayed = Counted(torch.mm), 0
    for a, b in pairs():
        device.names()
        made = function.is_replayed(a, b)
        if made is not None:
            replayed += 1
            assert device.names() == ["replay"]
            assert device.replayed[-1] == [[x.data_ptr() for x in (a, b, made)]]
            assert made.shape == (64, 64) and made.dtype is torch.bfloat16
    assert replayed > 20


def test_gemms_that_follow_one_another_are_one_launch(device: Device):
    """An allocation does not separate them."""
    function, replayed = Counted(lambda a, b: torch.mm(torch.mm(a, b), b)), 0
    for a, b in pairs():
        device.names()
        made = function.is_replayed(a, b)
        if made is not None:
            replayed += 1
            assert device.names() == ["replay"]
            (first, second, between), (third, fourth, last) = device.replayed[-1]
            assert (first, second, fourth) == (a.data_ptr(), b.data_ptr(), b.data_ptr())
            assert third == between and last == made.data_ptr()
    assert replayed > 20


def test_a_given_result_and_tensors_that_only_the_function_has(device: Device):
    place = drawn()
    address, kept = place.data_ptr(), [place]
    function, replayed = Counted(lambda a, out: torch.mm(a, kept[0], out=out)), 0
    del place
    for a, out in [(drawn(), drawn()) for _ in range(40)]:
        if function.is_replayed(a, out) is not None:
            kept.clear()  # the record keeps it
            replayed += 1
            assert device.replayed[-1] == [[a.data_ptr(), address, out.data_ptr()]]
    assert replayed > 20


def test_records_share_the_graph_of_a_form(device: Device):
    for function in (lambda a, b, out: torch.mm(a, b, out=out), lambda a, b, out: torch.mm(a, b, out=out) + 1):
        calls = Counted(function)
        for given in pairs():
            calls.repeated(*given, drawn())
        assert calls.calls < 20 and device.instantiated == 1
    wide = drawn().view(128, 32)
    assert gemm_graph.gemm_graph(_aten.mm.default, (wide, wide.t()), {}, aligned(128, 64).view(torch.bfloat16))
    assert device.instantiated == 2, "of another shape"


def test_a_capture_that_fails_leaves_the_gemm_to_pytorch(device: Device):
    device.broken = True
    assert gemm_graph.gemm_graph(_aten.mm.default, pairs(1)[0], {}, drawn()) is None


def test_other_settings_of_pytorch_are_not_those_that_were_recorded(device: Device, monkeypatch: pytest.MonkeyPatch):
    now = [True]
    monkeypatch.setattr(gemm_graph, "_accumulation", lambda: now[0])
    function, calls = Counted(torch.mm), iter(pairs(200))
    while function.is_replayed(*next(calls)) is None:
        pass
    now[0] = False
    assert function.is_replayed(*next(calls)) is None
    for _ in range(100):
        function.is_replayed(*next(calls))
    device.names()
    assert function.is_replayed(*next(calls)) is not None, "they are recorded anew"


def test_what_cannot_be_a_graph_is_computed_by_pytorch(device: Device):
    (a, b), made, bias = pairs(1)[0], drawn(), drawn()
    assert gemm_graph.gemm_graph(_aten.mm.default, (a, b), {}, made) is not None
    assert gemm_graph.gemm_graph(_aten.addmm.default, (bias, a, b), {}, bias) is None, "its arguments would be lost"
    wide = aligned(64, 64)
    assert gemm_graph.gemm_graph(_aten.mm.default, (wide, wide), {}, aligned(64, 64)) is None, "TF32 is a setting"
    empty = drawn()[:0]
    assert gemm_graph.gemm_graph(_aten.mm.default, (empty, b), {}, drawn()[:0]) is None
    device.refuses = True
    assert gemm_graph.gemm_graph(_aten.mm.default, (drawn(), b), {}, made) is None
    function = Counted(torch.mm)
    for x, y in pairs():
        assert torch.equal(function.repeated(x, y), torch.mm(x, y))
    assert function.calls < 20, "recorded all the same"
