# SPDX-License-Identifier: MIT
"""Private streams: their creation and sharing. The driver is a fake."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.backends.cuda import running
from tilescale.backends.cuda.running import queue_watch, streams, timeouts
from tilescale.backends.cuda.running.copy_queue import CopyQueue
from tilescale.backends.cuda.running.queue_watch import QueueWatch
from tilescale.backends.cuda.running.timeouts import WaitRecords
from tilescale.errors import DeviceError

GPU = torch.device("cuda", 1)


class Driver:
    """Contexts are pushed and popped; streams are numbers, from 16 on."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.contexts: list[str] = []
        self.refuses = False

    def call(self, name: str, *given: Any) -> Any:
        return getattr(self, name)(*given)

    def cuDeviceGet(self, ordinal: int) -> str:
        return f"device {ordinal}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> str:
        return f"context of {device}"

    def cuCtxPushCurrent(self, context: str) -> None:
        self.contexts.append(context)

    def cuCtxPopCurrent(self) -> str:
        return self.contexts.pop()

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        if self.refuses:
            raise DeviceError("cuStreamCreateWithPriority: CUDA_ERROR_OUT_OF_MEMORY")
        assert self.contexts == ["context of device 1"]
        self.made.append((flags, priority))
        return 15 + len(self.made)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(streams.driver, "call", made.call)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (number, device))
    monkeypatch.setattr(torch.cuda, "Stream", None)
    streams.past_waits.cache_clear()
    yield made
    streams.past_waits.cache_clear()


def test_each_stream_is_a_new_one_of_the_device(driver: Driver):
    assert streams.own_stream(GPU) == (16, GPU)
    assert CopyQueue(GPU).stream == (17, GPU)
    assert driver.made == [(1, 0), (1, -1)] and driver.contexts == []


def test_the_stream_of_the_caller_goes_on_after_what_the_queue_was_given(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    """Once for each start; what was held back is given before."""
    queue, done = CopyQueue(GPU), []
    event = SimpleNamespace(record_event=lambda: "event", wait_stream=lambda stream: done.append(("join", stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: event)
    queue.stream = SimpleNamespace(wait_event=lambda event: done.append("start"))
    queue.join()
    assert done == [], "nothing was started"
    queue.start()
    queue.hold()
    queue.add(lambda: done.append("copy"))
    queue.join()
    assert done == ["start", "copy", ("join", queue.stream)] and not queue.is_held
    queue.join()
    assert done.count(("join", queue.stream)) == 1


def test_a_refusal_leaves_the_context_as_it_was(driver: Driver):
    driver.refuses = True
    with pytest.raises(DeviceError):
        streams.own_stream(GPU)
    assert driver.contexts == []


def test_all_programs_stop_and_look_by_one_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """For any number of streams: that of a waiting program is not one of them."""
    zeros, full = torch.zeros, torch.full
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **given: zeros(*shape, **given))
    monkeypatch.setattr(torch, "full", lambda *shape, pin_memory=False, **given: full(*shape, **given))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    addresses = SimpleNamespace(stride=1 << 20, slot=lambda rank: rank)
    team = SimpleNamespace(size=2, rank=0)
    heap = SimpleNamespace(team=team, device=GPU, addresses=addresses)
    records = [WaitRecords(heap, zeros(WaitRecords.words_of(2), dtype=torch.int64)) for _ in range(40)]
    watches = [QueueWatch(each, 1, GPU, lambda: None, start=False) for each in records]
    assert {each._stream for each in (*records, *watches)} == {(16, GPU)} and len(driver.made) == 1
    assert timeouts.past_waits is queue_watch.past_waits


def test_no_stream_comes_from_the_pool():
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(running.__path__[0]).rglob("*.py")}
    assert [name for name, text in texts.items() if "torch.cuda.Stream(" in text] == []
