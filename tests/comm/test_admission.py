# SPDX-License-Identifier: MIT
"""Admission without a job: members that are admitted, connections that are refused, and their time limits."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tilescale.comm import admission
from tilescale.comm.admission import Admission
from tilescale.comm.trust.handshake import CHALLENGE_BYTES, HELLO_BYTES, JOINED_BEFORE, WELCOME, Hello, new_nonce
from tilescale.comm.trust.key import JobKey

KEY, OTHER, JOB, SIZE = JobKey(b"ours"), JobKey(b"other"), new_nonce(), 4
SOON_S = 30.0


class Listener(socket.socket):
    """A listening socket that is out of descriptors for some calls."""

    failures, calls = 0, 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Entrance:
    """An admission, and the members that joined."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(16)
        self.joined: dict[int, socket.socket] = {}
        self.heard: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.serves: Callable[[socket.socket], None] | None = lambda connection: self.heard.append(connection.recv(99))
        self.admission = Admission(self.listener, KEY, JOB, SIZE, self._join, "admits")

    def _join(self, connection: socket.socket, member: int, process: str) -> Callable[[], None] | None:
        self.joined[member] = connection
        serves = self.serves
        return serves and (lambda: serves(connection))

    def knock(self, message: bytes = b"") -> socket.socket:
        """A connection that sends something."""
        connection = socket.create_connection(self.listener.getsockname(), timeout=SOON_S)
        connection.sendall(message)
        self.connections.append(connection)  # it stays open
        return connection

    def enter(self, member: int, key: JobKey = KEY) -> tuple[socket.socket, bytes]:
        """A connection that proves to be a member's, and the verdict."""
        hello = Hello(KEY, member)
        connection = self.knock(hello.message)
        proof, job, _ = hello.prove(connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        assert job == JOB
        connection.sendall(proof if key is KEY else b"x" * len(proof))
        return connection, answer(connection)

    def close(self) -> None:
        """Close it, or fail where that does not end."""
        closing = threading.Thread(target=self.admission.close, daemon=True)
        closing.start()
        closing.join(SOON_S)
        assert not closing.is_alive()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is refused for its time while a test waits for another reason."""
    monkeypatch.setattr(admission, "_PROVE_WITHIN_S", 10 * SOON_S)


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    made = Entrance()
    made.admission.start()
    yield made
    made.close()


def answer(connection: socket.socket) -> bytes:
    """One byte, or none where the other side has closed the connection."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed it yet."""
    connection.settimeout(0.01)
    try:
        return answer(connection) != b""
    except TimeoutError:
        return True
    finally:
        connection.settimeout(SOON_S)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_each_member_is_admitted_once_and_heard_from_then_on(entrance: Entrance) -> None:
    one, welcome = entrance.enter(1)
    assert welcome == WELCOME and eventually(lambda: set(entrance.joined) == {1})
    again, refused = entrance.enter(1)
    assert refused == JOINED_BEFORE and answer(again) == b"" and entrance.enter(SIZE - 1)[1] == WELCOME
    one.sendall(b"news")
    assert eventually(lambda: entrance.heard == [b"news"])
    mine = entrance.joined[1]
    assert not mine.getblocking() and mine.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_connection_that_is_handled_elsewhere_is_left_alone(entrance: Entrance) -> None:
    entrance.serves = None
    one, _ = entrance.enter(1)
    one.sendall(b"news")
    assert eventually(lambda: 1 in entrance.joined)
    mine = entrance.joined[1]
    mine.settimeout(SOON_S)
    assert mine.recv(99) == b"news" and entrance.enter(2)[1] == WELCOME


def test_a_member_is_forgotten(entrance: Entrance) -> None:
    entrance.serves = entrance.admission.forget
    one, _ = entrance.enter(1)
    one.sendall(b"goodbye")
    assert eventually(lambda: not is_open(one)) and entrance.enter(2)[1] == WELCOME


@pytest.mark.parametrize("member", [0, SIZE])
def test_a_rank_outside_of_the_job_gets_no_challenge(entrance: Entrance, member: int) -> None:
    assert answer(entrance.knock(Hello(KEY, member).message)) == b""


def test_a_connection_that_proves_nothing_is_refused(entrance: Entrance) -> None:
    assert entrance.enter(1, OTHER)[1] == b"" and not entrance.joined
    leaving = entrance.knock(b"half")
    leaving.shutdown(socket.SHUT_WR)
    assert answer(leaving) == b"" and entrance.enter(1)[1] == WELCOME


def test_a_connection_that_is_lost_is_refused(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(connection: socket.socket) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(admission, "keep_alive", is_lost)
    assert entrance.enter(1)[1] == b""
    monkeypatch.undo()
    assert entrance.enter(1)[1] == WELCOME


def test_no_member_is_admitted_after_the_end(entrance: Entrance) -> None:
    entrance.admission.is_over = True
    assert entrance.enter(1)[1] == b"" and not entrance.joined


def test_a_message_may_come_in_parts(entrance: Entrance) -> None:
    hello = Hello(KEY, 2)
    connection = entrance.knock(hello.message[:7])
    assert is_open(connection)
    connection.sendall(hello.message[7:])
    proof, *_ = hello.prove(connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
    connection.sendall(proof[:5])
    assert is_open(connection)
    connection.sendall(proof[5:] + b"news")
    assert answer(connection) == WELCOME and eventually(lambda: entrance.heard == [b"news"])


def test_a_connection_has_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_PROVE_WITHIN_S", 0.3)
    entrance = Entrance()
    entrance.admission.start()
    begin, silent, half = time.monotonic(), entrance.knock(), entrance.knock(b"x" * (HELLO_BYTES - 1))
    assert answer(silent) == answer(half) == b"" and time.monotonic() - begin > 0.25
    entrance.close()


def test_of_too_many_connections_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_UNPROVEN", 2)
    entrance = Entrance()
    entrance.admission.start()
    silent = [entrance.knock() for _ in range(SIZE + 2)]
    time.sleep(0.2)
    assert all(map(is_open, silent))
    last = entrance.knock()
    assert answer(silent[0]) == b"" and all(map(is_open, [*silent[1:], last]))
    entrance.close()


def test_a_connection_may_go_while_its_data_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins late: a new connection, and data of the oldest one, which is refused for it."""
    monkeypatch.setattr(admission, "_UNPROVEN", 1 - SIZE)
    entrance = Entrance()
    oldest = entrance.knock()
    entrance.admission._accept()
    entrance.knock()
    oldest.sendall(Hello(KEY, 1).message)
    entrance.admission.start()
    assert eventually(lambda: not is_open(oldest)) and entrance.enter(2)[1] == WELCOME
    entrance.close()


def test_without_descriptors_it_pauses() -> None:
    entrance = Entrance()
    entrance.listener.failures = 2
    entrance.admission.start()
    begin = time.monotonic()
    assert entrance.enter(1)[1] == WELCOME
    assert entrance.listener.calls == 3 and time.monotonic() - begin > 2 * admission._PAUSE_S
    entrance.close()


def test_an_idle_thread_does_not_poll(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    entrance.enter(1)
    tidied: list[int] = []
    monkeypatch.setattr(entrance.admission, "_tidy", lambda: tidied.append(1))
    time.sleep(0.5)
    assert len(tidied) <= 1


def test_the_end_waits_for_the_thread_and_drops_unproven_connections() -> None:
    entrance, began, ended = Entrance(), threading.Event(), threading.Event()

    def serves(connection: socket.socket) -> None:
        connection.recv(99)
        began.set()
        time.sleep(0.3)
        ended.set()

    entrance.serves = serves
    entrance.admission.start()
    (member, _), silent = entrance.enter(1), entrance.knock()
    assert eventually(lambda: len(entrance.admission._unproven) == 1)
    member.sendall(b"news")
    assert began.wait(SOON_S)
    entrance.close()
    assert ended.is_set() and answer(silent) == b"" and is_open(member)
    assert entrance.listener.fileno() < 0
    with pytest.raises(OSError):
        entrance.knock()


def test_a_forked_process_does_not_listen(entrance: Entrance) -> None:
    assert not entrance.listener.getblocking()
    child = os.fork()
    if not child:
        os._exit(entrance.listener.fileno() >= 0)
    assert os.waitpid(child, 0)[1] == 0
