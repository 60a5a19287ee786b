# SPDX-License-Identifier: MIT
"""A stream's wait has no bound: detection of waits that take too long, reports, and their end."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.backends.cuda.running import queue_watch, stream_memory, timeouts
from tilescale.backends.cuda.running.queue_watch import QueueWait, QueueWatch
from tilescale.backends.cuda.running.stream_memory import WaitCondition, Word, WordWrite
from tilescale.backends.cuda.running.timeouts import HEAD, ROW, WaitFailure, WaitRecords, WaitReport, decode
from tilescale.backends.cuda.running.wait_guard import WaitGuard

LIMIT_S = 4.0
"""Bound of a kernel's wait; a stream's bound is twice that."""

FLAG = Word(0x1000, 4)


class Records:
    """A watch's knowledge of a program."""

    def __init__(self) -> None:
        self.stopped = False
        self.failed: list[tuple[Any, ...]] = []

    def fail(self, *report: Any) -> None:
        self.failed.append(report)
        self.stopped = True

    def read_at(self, word: Word) -> int:
        assert word == FLAG
        return 1


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A watch whose queue does what it is given at once, up to a wait: `go` lets it on; `released` is what is written
    elsewhere."""
    monkeypatch.setattr(queue_watch, "past_waits", lambda device: None)
    records, state = Records(), SimpleNamespace(call=0, released=[], queue=[], go=None)
    watch = QueueWatch(records, int(LIMIT_S * 1e9), torch.device("cpu"), lambda: state.call, start=False)

    def write(stream: Any, word: Word, value: int) -> None:
        if word != watch._word:
            state.released.append((word, value))
        elif state.queue:
            state.queue.append(value)
        else:
            watch._now[0] = value

    def go() -> None:
        state.queue.pop(0)
        while state.queue and not isinstance(state.queue[0], WaitCondition):
            watch._now[0] = state.queue.pop(0)

    monkeypatch.setattr(stream_memory, "write", write)

    def add(stream: Any, begun: WordWrite, condition: WaitCondition, over: WordWrite) -> None:
        write(stream, begun.word, begun.value)
        state.queue.append(condition)
        write(stream, over.word, over.value)

    wait = lambda place: add(None, *watch.wait(place))  # noqa: E731
    return SimpleNamespace(watch=watch, records=records, state=state, go=go, wait=wait)


def place(site: int = 3, value: int = 2, compare: str = ">=") -> QueueWait:
    return QueueWait(site, 5, WaitCondition(FLAG, compare, value))


def test_a_queue_that_waits_for_nothing_is_let_alone(scene):
    assert not any(scene.watch.look(now) for now in range(100)) and not scene.records.failed


def test_a_wait_that_takes_too_long_is_reported_once_and_then_ended(scene):
    scene.wait(place())
    for now in range(9):
        assert not scene.watch.look(now) and not scene.records.failed
    scene.watch.look(9)
    assert scene.records.failed == [(WaitFailure.TIMEOUT, 3, 5, 2, 1)] and scene.state.released == []
    assert scene.watch.look(9.1) and scene.state.released == [(FLAG, 2)]
    scene.go()
    assert not scene.watch.look(9.2) and len(scene.records.failed) == 1


def test_waits_of_calls_that_go_on_are_not_one_wait(scene):
    for now in range(50):
        scene.wait(place())
        scene.watch.look(now)
        scene.go()
    assert not scene.records.failed


def test_a_graph_that_is_replayed_comes_to_the_same_wait(scene):
    scene.wait(place())
    for now in range(100):  # the host sees the same values, only the calls are different
        scene.state.call = now // 3
        scene.watch.look(now)
    assert not scene.records.failed
    for now in range(100, 120):
        scene.watch.look(now)
    assert len(scene.records.failed) == 1


def test_a_guards_watch_sees_that_ranks_synchronize(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue_watch, "past_waits", lambda device: None)
    monkeypatch.setattr(queue_watch, "_watch", lambda watch: None)
    guard = WaitGuard.__new__(WaitGuard)
    guard._limit_ns, guard._device = 1, torch.device("cpu")
    guard.records = SimpleNamespace(read_concurrently=lambda tensor: tensor.tolist())
    guard.ranks = SimpleNamespace(words=torch.tensor([3, 4]))
    assert guard.watch._progress() == [3, 4]


def test_a_stopped_program_waits_for_nothing_that_is_queued(scene):
    for value in (1, 2, 4):
        scene.wait(place(value=value))
    scene.records.stopped = True
    for _ in range(3):
        assert scene.watch.look(0.0)
        scene.go()
    assert not scene.watch.look(0.0) and not scene.records.failed
    # One word, several values: the largest is enough for all.
    assert scene.state.released == [(FLAG, 4)] * 3


@pytest.mark.parametrize(("compare", "enough"), [(">=", 2), (">", 3), ("==", 2)])
def test_what_ends_a_wait_satisfies_it(scene, compare: str, enough: int):
    scene.wait(place(compare=compare))
    scene.records.stopped = True
    assert scene.watch.look(0.0) and scene.state.released == [(FLAG, enough)]


def test_equal_values_are_places_of_their_own(scene):
    for value in (1, 2):
        scene.wait(place(value=value, compare="=="))
    scene.records.stopped = True
    for value in (1, 2):
        assert scene.watch.look(0.0) and scene.state.released.pop() == (FLAG, value)
        scene.go()


@pytest.mark.parametrize(("status", "goes_on"), [(0, True), (600, True), (700, False)])
def test_a_look_that_fails_ends_the_watch_of_a_lost_device_alone(
    scene, status: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    watch = scene.watch
    watch._stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(queue_watch, "_watches", {watch})
    monkeypatch.setattr(queue_watch.driver, "function", lambda name: lambda stream: (status,))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(watch, "look", lambda now: [][now])
    assert not queue_watch._look(watch) and not queue_watch._look(watch)
    assert queue_watch._watches == ({watch} if goes_on else set())
    assert capsys.readouterr().err.count("copy queue of cpu goes on after TypeError") == int(goes_on)


def test_the_hosts_report_is_as_a_kernels_on_all_devices(monkeypatch):
    """Written word by word, the state after the rest of the row, the word that stops last."""
    memory = torch.zeros(3, HEAD + 3 * ROW, dtype=torch.int64)
    order: list[int] = []

    def write(stream: Any, word: Word, value: int) -> None:
        at = (word.address - memory.data_ptr()) // 8
        order.append(at)
        memory.view(-1)[at] = value

    monkeypatch.setattr(timeouts.stream_memory, "write", write)
    records = WaitRecords.__new__(WaitRecords)
    records._heap = SimpleNamespace(team=SimpleNamespace(rank=1, size=3), peers=lambda words: memory)
    records._words, records._stream, records._stopped = memory[1], None, [0]
    records.fail(WaitFailure.TIMEOUT, 7, 5, 2, -1)
    for device in range(3):
        assert decode(memory[device].tolist()) == [WaitReport(1, WaitFailure.TIMEOUT, 7, (0, 0, 0), 5, 2, -1)]
        mine = [at - device * (HEAD + 3 * ROW) for at in order[8 * device : 8 * device + 8]]
        assert mine[-2:] == [HEAD + ROW, 0] and memory[device, 0] == 2
    assert records.stopped and records.failed
    assert memory[0, 0] == 2 and records._stopped == [2]


def test_a_program_that_the_host_stops_has_not_failed(monkeypatch: pytest.MonkeyPatch):
    records = WaitRecords.__new__(WaitRecords)
    records._words, records._stop, records._stream = torch.zeros(HEAD), torch.tensor([timeouts.STOPPED_BY_HOST]), None
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    records._stopped = [0]
    assert not records.stopped and not records.failed
    records.stop()
    assert records.stopped and not records.failed
    assert records._words.tolist() == [timeouts.STOPPED_BY_HOST, *[0] * (HEAD - 1)]


def test_a_wait_is_watched_until_its_end_has_been_seen(scene):
    assert not scene.watch.is_waiting
    scene.wait(place())
    assert scene.watch.is_waiting
    scene.watch.look(0)
    scene.go()
    assert scene.watch.is_waiting
    scene.watch.look(1)
    assert not scene.watch.is_waiting


def test_one_thread_looks_at_all_watches(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def thread(**given: Any) -> Any:
        return SimpleNamespace(start=lambda: made.append(given["name"]), is_alive=lambda: True)

    monkeypatch.setattr(queue_watch, "past_waits", lambda device: None)
    monkeypatch.setattr(queue_watch, "_thread", None)
    monkeypatch.setattr(queue_watch, "_watches", set())
    monkeypatch.setattr(queue_watch.threading, "Thread", thread)
    watches = {QueueWatch(Records(), 10**9, torch.device("cpu"), lambda: 0) for _ in range(2)}
    assert queue_watch._watches == watches and made == ["tilescale-queue"]
