# SPDX-License-Identifier: MIT
"""Functions of tensors whose calls are recorded: what later calls of the form launch, allocate and compute."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilescale
from tests.autograd_nodes import no_graph_is_kept
from tests.cuda.fakes import Device, aligned, record_on_cpu
from tests.cuda.test_execute_calls import fetched
from tilescale.backends.cuda.running import repeated
from tilescale.backends.cuda.running.plans import ALIGNED
from tilescale.backends.cuda.running.recording import recorded_memory
from tilescale.backends.cuda.running.repeated import TRIED, RecordedCalls
from tilescale.comm import world
from tilescale.errors import WaitTimeoutError
from tilescale.ops.plain_calls import plain_calls_repeat

ENOUGH = TRIED[2] + 1
PACKAGE = str(Path(tilescale.__file__).parent)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two, whose tensors count as a GPU's."""
    record_on_cpu(monkeypatch)
    return Device(monkeypatch)


class Counted:
    """A function that is called again where its calls are not known: a copy, a program, and what `after` makes."""

    def __init__(self, device: Device, after: Callable[[torch.Tensor], Any] = lambda y: y):
        self.own, self.after, self.calls = device.program(fetched()), after, 0
        self.room = device.heap.zeros((64, 64), torch.float32)
        self.repeated = RecordedCalls(self._call)

    def _call(self, x: torch.Tensor, *others: Any) -> Any:
        self.calls += 1
        self.room.copy_(x)
        made = torch.empty(64 * 64 + ALIGNED)
        tile = made[-made.data_ptr() % ALIGNED // 4 :][: 64 * 64].view(64, 64)
        self.own([self.room, tile])
        return self.after(tile, *others)

    def __call__(self, x: torch.Tensor, *others: Any) -> Any:
        return self.repeated(x, *others)


def drawn() -> torch.Tensor:
    """New numbers, where a GPU's allocator would put them."""
    return aligned(64, 64)


def test_calls_of_a_form_are_one_call_of_c_at_any_places(device: Device):
    function, kept = Counted(device), []
    for _ in range(ENOUGH):
        kept.append(function(drawn()))
    known = 0
    for _ in range(12):
        before, x = function.calls, drawn()
        device.names()
        kept.append(function(x))
        launched = device.names()
        assert torch.equal(function.room, x), "the copy is of this call's tensor"
        places = {value for passed in device.replayed[-1] for value in passed}
        assert kept[-1].data_ptr() in places and kept[-1].shape == (64, 64)
        if function.calls == before:  # not called again, except for adjacent tensors
            assert launched == ["copy", "replay"], "nothing else is launched"
            assert not kept[-1]._is_view()
            known += 1
    assert known >= 9
    assert len({y.data_ptr() for y in kept}) == len(kept), "each call has results of its own"


def test_operations_of_pytorch_between_programs_are_computed_again(device: Device):
    weight = torch.randn(64, 32)

    def after(y: torch.Tensor, scale: float) -> list[torch.Tensor]:
        y.fill_(scale)
        return [torch.mm(y, weight), y.t()[:3]]

    function = Counted(device, after)
    for scale in (1.0, 2.0):
        for _ in range(ENOUGH + 2):
            product, rows = function(drawn(), scale)
            torch.testing.assert_close(product, torch.full((64, 64), scale) @ weight)
            assert rows.shape == (3, 64) and rows.stride() == (1, 64) and (rows == scale).all()
    assert TRIED[0] < function.calls <= TRIED[2] + TRIED[0], "and not called in every call"


def test_a_recording_imports_no_compiler():
    script = "import sys, torch; from tilescale.backends.cuda.running import recording; x = torch.ones(3, 3); "
    script += "recording.stream_order = lambda device: None; made, _ = recording.recorded(lambda: x + x, [x]); "
    script += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("before", [0, ENOUGH])
def test_a_graph_of_the_caller_holds_each_operation_once(device: Device, before: int):
    weight, counted, products = torch.randn(64, 64), Counted(device), 0
    function = RecordedCalls(lambda x: counted._call(x @ weight))

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            products += func is torch.ops.aten.mm.default
            return func(*args, **kwargs or {})

    for _ in range(before):
        function(drawn())
    device.capturing = True
    with Counting():
        for _ in range(4 * ENOUGH):
            function(drawn())
    assert products == 4 * ENOUGH


def test_other_forms_and_other_arguments_are_told_apart(device: Device):
    seen: list[Any] = []
    function = RecordedCalls(lambda x, numbers: seen.append(numbers) or x + sum(numbers))
    for numbers in ([1, 2], [3, 4]):
        for _ in range(ENOUGH):
            assert function(x := drawn(), numbers).equal(x + sum(numbers))
    x = torch.randn(5)
    assert function(x, [1, 2]).equal(x + 3)
    assert [3, 4] in seen and seen[-1] == [1, 2]


def test_plain_calls_of_a_public_function_are_recorded_with_its_choices(device: Device):
    counted = Counted(device, lambda y, scales: [y.fill_(3) * scale for scale in scales])
    chosen: list[Any] = []

    @plain_calls_repeat
    def public(x: torch.Tensor, others: Any, *, scales: Any = (2, 3), group: Any = None) -> Any:
        chosen.append(scales)
        return tuple(counted._call(x, scales)) if others is None else public(others[0], None, scales=scales)

    for options in ({}, {"scales": [2.0, 3]}, {"scales": (True, 3), "group": "tp"}):
        recorded = 0
        for _ in range(8 * ENOUGH):  # adjacent tensors are another form
            before, x = len(chosen), drawn()
            made = public(x, (drawn().copy_(x), [1]), **options)
            assert made.__class__ is tuple and torch.equal(counted.room, x)
            for y, scale in zip(made, options.get("scales", (2, 3)), strict=True):
                assert (y == 3 * scale).all()
            recorded += len(chosen) == before
        assert recorded > 0
    calls = len(chosen)
    public(drawn().requires_grad_(), None)
    with torch.no_grad():
        public(drawn(), [drawn()], scales={4})
    assert len(chosen) == calls + 3, "autograd sees the function, and so does an argument that cannot be hashed"


def test_a_recorded_call_runs_few_functions_of_python(device: Device):
    counted = Counted(device)
    public, ran = plain_calls_repeat(counted._call), list[str]()

    def noted(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((PACKAGE, str(Path(torch.__file__).parent))):
            ran.append(frame.f_code.co_name)

    for _ in range(3 * ENOUGH):
        calls, x = counted.calls, drawn()
        ran.clear()
        sys.setprofile(noted)
        public(x)
        sys.setprofile(None)
    assert counted.calls == calls, "the last one is recorded"
    assert 0 < len(ran) <= 21, ran


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y * y.sum().item(),  # a value of the device decides
        lambda y: y[y >= 0],  # a shape that follows values
        lambda y: repeated.not_recorded() or y,
    ],
)
def test_what_is_not_the_same_in_each_call_is_not_recorded(device: Device, after: Callable[..., Any]):
    function = Counted(device, after)
    for _ in range(ENOUGH):
        function(drawn())
    assert function.calls == ENOUGH


def test_forms_are_tried_again_after_many_calls(device: Device):
    allowed: list[bool] = []
    function = Counted(device, lambda y: y if allowed else repeated.not_recorded() or y)
    for _ in range(100):
        function(drawn())
    assert function.calls == 100
    allowed.append(True)
    for _ in range(200):
        function(drawn())
    assert function.calls < 200, "except for adjacent tensors"


def test_a_failed_wait_is_raised_and_nothing_launched(device: Device):
    function = Counted(device)
    for _ in range(ENOUGH):
        function(drawn())
    device.names()
    device.guard.error = WaitTimeoutError("a wait failed")
    with pytest.raises(WaitTimeoutError):
        function(drawn())
    assert device.names() == []


def test_programs_that_forget_their_calls_are_called_again(device: Device):
    function = Counted(device)
    for _ in range(ENOUGH):
        function(drawn())
    function.own._plans.clear()
    before = function.calls
    function(drawn())
    assert function.calls == before + 1 and device.names()[-1] == "fetched_0"
    for _ in range(60):
        function(drawn())
    assert function.calls < before + 40, "and recorded anew"


def test_captured_calls_and_memory_that_is_replaced(device: Device):
    function = Counted(device)
    for _ in range(ENOUGH):
        function(drawn())
    before = function.calls
    device.capturing = True
    function(drawn())
    assert function.calls == before + 1, "the caller's graph gets what the function launches"
    device.capturing = False
    function(drawn())
    assert function.calls == before + 1
    recorded_memory.replaced()
    function(drawn())
    assert function.calls == before + 2


def test_calls_of_a_group_that_has_lost_ranks(device: Device, monkeypatch: pytest.MonkeyPatch):
    function = Counted(device)
    for _ in range(ENOUGH):
        function(drawn())
    before = function.calls
    monkeypatch.setattr(world, "_shrunk", 1)
    function(drawn())
    assert function.calls == before + 1


def test_tensors_that_lie_behind_one_another_are_a_form_of_their_own(device: Device):
    """A function may take both for one: of those recorded, each call has one matrix or two."""
    taken: list[bool] = []

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        taken.append(y.data_ptr() == x.data_ptr() + x.nbytes)
        both = x.as_strided((128, 64), (64, 1)) if taken[-1] else torch.cat([x, y])
        return both + 0

    function = RecordedCalls(joined)
    for number in range(4 * ENOUGH):
        memory = aligned(192, 64)
        x, y = memory[:64], memory[64:128] if number % 2 else memory[128:]
        made = function(x, y)
        assert torch.equal(made, torch.cat([x, y])) and not made._is_view()
    assert taken.count(True) == taken.count(False) == TRIED[0], "without a program, too"


def test_a_tensor_in_two_places_is_one(device: Device):
    """As one that a result takes the place of; calls with two tensors are others."""
    function = Counted(device, lambda tile, other: (tile, other))
    for _ in range(ENOUGH):
        x, y = drawn(), drawn()
        function.repeated(x, x)
        function.repeated(x, y)
    before = function.calls
    for _ in range(6):
        x, y = drawn(), drawn()
        for other in (x, y):
            made, same = function.repeated(x, other)
            assert same.data_ptr() == other.data_ptr() != made.data_ptr()
            assert torch.equal(function.room, x)
    assert function.calls <= before + 3, "not called again, except for adjacent tensors"


def test_symmetric_tensors_of_the_caller_stay_where_they_are(device: Device):
    """Their addresses decide what is launched."""
    own, calls = device.program(fetched()), 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        made = torch.empty(64, 64)
        own([x, made])
        return made

    function, x = RecordedCalls(call), device.heap.zeros((64, 64), torch.float32)
    for _ in range(ENOUGH):
        function(x)
    assert calls == ENOUGH


def test_records_keep_no_graph_of_autograd(device: Device):
    function, leaf = Counted(device), torch.randn(64, 64, requires_grad=True)
    for _ in range(3 * ENOUGH):
        with no_graph_is_kept([leaf]):
            x = drawn().requires_grad_() + leaf
            with torch.no_grad():  # as an operator's forward
                function(x)
            del x
    assert function.calls < 3 * ENOUGH, "some calls were recorded"
