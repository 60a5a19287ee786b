# SPDX-License-Identifier: MIT
"""File descriptors between real processes: they arrive, strangers and garbage do not, and every wait has a bound."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tilescale.alarm import raise_after
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import descriptors
from tilescale.comm.heap.descriptors import Mailbox, exchange, send
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.trust import same_user
from tilescale.errors import LaunchError, RankFailedError

ROOT = Path(__file__).parents[2]
PEER = """
import os, sys
from tilescale.comm.heap.descriptors import send
name, rank, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
memory = os.memfd_create("peer")
os.write(memory, text.encode())
send(name, rank, memory)
"""


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    yield box
    box.close()


def peer(name: str, rank: int, text: str, code: str = PEER) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code, name, str(rank), text], env=env)


def wait_for(box: Mailbox, ranks: list[int], seconds: float = 20.0) -> dict[int, int]:
    end = time.monotonic() + seconds
    while (found := box.take(ranks)) is None:
        assert time.monotonic() < end, f"nothing from {box.missing(ranks)}"
        time.sleep(0.01)
    return found


def memory(text: bytes = b"") -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor


def connected(mailbox: Mailbox) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + mailbox.name)
    return connection


def test_descriptors_of_processes_arrive(mailbox: Mailbox) -> None:
    processes = [peer(mailbox.name, rank, f"memory of {rank}") for rank in (3, 5)]
    found = wait_for(mailbox, [3, 5])
    assert [process.wait(20) for process in processes] == [0, 0]
    for rank, descriptor in found.items():
        assert os.pread(descriptor, 100, 0) == f"memory of {rank}".encode()
        assert not os.get_inheritable(descriptor)
        os.pwrite(descriptor, b"x", 0)  # shared, not copied
        os.close(descriptor)


def test_nothing_is_left_behind(mailbox: Mailbox) -> None:
    assert not os.path.exists(mailbox.name), "no file stands for the socket"
    before = len(os.listdir("/proc/self/fd"))
    for sender in range(4):
        own = memory()
        send(mailbox.name, sender, own)
        os.close(own)
    assert mailbox.take([9]) is None, "takes in what waits"
    assert len(os.listdir("/proc/self/fd")) == before + 4
    mailbox.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2, "unclaimed descriptors, socket and selector are closed"


def test_another_user_is_turned_away(mailbox: Mailbox, monkeypatch) -> None:
    own = memory()
    monkeypatch.setattr(same_user, "is_ours", lambda _connection: False)
    with pytest.raises(LaunchError, match="another user listens there"):
        send(mailbox.name, 0, own)
    connection = connected(mailbox)
    socket.send_fds(connection, [descriptors._MESSAGE.pack(0)], [own])
    assert mailbox.take([0]) is None
    monkeypatch.undo()
    send(mailbox.name, 0, own)
    assert list(wait_for(mailbox, [0])) == [0]


def test_garbage_is_dropped(mailbox: Mailbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for message, count in ((b"", 0), (b"hello, world", 1), (descriptors._MESSAGE.pack(1), 2)):
        with connected(mailbox) as stranger:
            own = [memory() for _ in range(count)]
            if message or own:
                socket.send_fds(stranger, [message], own)
            for descriptor in own:
                os.close(descriptor)
    first, second = memory(b"first"), memory(b"second")
    send(mailbox.name, 1, first)
    send(mailbox.name, 1, second)  # the same rank again
    found = wait_for(mailbox, [1])
    assert os.pread(found[1], 10, 0) == b"first"
    for descriptor in (first, second, found[1]):
        os.close(descriptor)
    assert mailbox.take([2]) is None
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors that came with garbage are closed"


def test_a_slow_sender_does_not_block_the_others(mailbox: Mailbox) -> None:
    slow = connected(mailbox)
    send(mailbox.name, 1, memory(b"quick"))
    with raise_after(5.0, TimeoutError("the mailbox waits for the slow one")):
        assert list(wait_for(mailbox, [1])) == [1]
    socket.send_fds(slow, [descriptors._MESSAGE.pack(0)], [memory(b"slow")])
    assert list(wait_for(mailbox, [0])) == [0]


def test_a_peer_that_is_gone(mailbox: Mailbox) -> None:
    code = "import time; from tilescale.comm.heap.descriptors import Mailbox; box = Mailbox()"
    code += "; print(box.name, flush=True); time.sleep(60)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    start = time.monotonic()
    with pytest.raises(LaunchError, match="has just ended"):
        send(name, 0, memory())
    assert time.monotonic() - start < 5


def test_the_wait_is_bounded_and_names_the_missing_rank(run_ranks) -> None:
    def work(team):
        group, call = HeapGroup(team), CollectiveCall.here("empty")
        with closing(Mailbox()) as box:
            names = group.all_gather(call, box.name)
            if team.rank == 1:
                time.sleep(2)  # and never sends
                return
            exchange(group, call, box, names, memory(), [1])

    outcome = run_ranks(2, work, timeout_s=1.0)[0]
    assert isinstance(outcome, RankFailedError) and "rank 1" in str(outcome) and "empty()" in str(outcome)


def test_a_failure_elsewhere_explains_a_closed_mailbox(run_ranks) -> None:
    def work(team):
        group, call, box = HeapGroup(team), CollectiveCall.here("empty"), Mailbox()
        names = group.all_gather(call, box.name)
        box.close()
        team.barrier()
        if team.rank == 1:
            team._session.failure_log.failed(1, "rank 1 disappeared")
            return None
        with closing(Mailbox()) as other:
            exchange(group, call, other, names, memory(), [1])

    outcome = run_ranks(2, work)[0]
    assert isinstance(outcome, RankFailedError) and "rank 1 disappeared" in str(outcome)
