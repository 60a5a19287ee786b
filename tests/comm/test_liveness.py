# SPDX-License-Identifier: MIT
"""Connections by which ranks monitor each other: authentication, and bounds on unauthenticated peers."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale.comm import admission
from tilescale.comm.liveness import LivenessConnection
from tilescale.comm.liveness_server import LivenessServer
from tilescale.comm.trust import handshake
from tilescale.comm.trust.handshake import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, Answer, Hello, new_nonce
from tilescale.comm.trust.key import JobKey
from tilescale.errors import ForgedMessageError, LaunchError

KEY, OTHER, JOB, SIZE = JobKey(b"ours"), JobKey(b"other"), new_nonce(), 8


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


class Door:
    """A server, the processes of ranks that have joined, and the ranks that it found to be gone."""

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.gone: list[int] = []
        self.server = LivenessServer("127.0.0.1", KEY, JOB, SIZE, self.processes.__setitem__, self.gone.append)
        self.address = ("127.0.0.1", self.server.port)

    def join(self, rank: int, key: JobKey = KEY) -> LivenessConnection:
        return LivenessConnection(self.address, key, rank, 10.0)

    def knock(self, message: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=10.0)
        connection.sendall(message)
        return connection


@pytest.fixture
def door() -> Iterator[Door]:
    yield Door()


def test_a_rank_is_held_until_its_end_is_reported() -> None:
    """Rank 0 exits when it holds none: a report in another thread would then still be in a call of the store, in C++,
    which Python's exit aborts.
    """
    reported, may_end, held = threading.Event(), threading.Event(), []

    def report(_: int) -> None:
        reported.set()
        may_end.wait(10)
        held.append(server.holding())

    server = LivenessServer("127.0.0.1", KEY, JOB, SIZE, lambda *_: None, report)
    rank = LivenessConnection(("127.0.0.1", server.port), KEY, 5, 10.0)
    assert eventually(lambda: server.holding() == {5})
    rank.close()
    assert reported.wait(10) and server.holding() == {5}
    may_end.set()
    assert eventually(lambda: not server.holding()) and held == [{5}]


def test_an_end_is_reported_to_the_next_group_too() -> None:
    """One that is found while the survivors make a group anew."""
    reported, may_end = threading.Event(), threading.Event()
    later: list[int] = []

    def report(_: int) -> None:
        reported.set()
        may_end.wait(10)

    server = LivenessServer("127.0.0.1", KEY, JOB, SIZE, lambda *_: None, report)
    rank = LivenessConnection(("127.0.0.1", server.port), KEY, 5, 10.0)
    assert eventually(lambda: server.holding() == {5})
    rank.close()
    assert reported.wait(10)
    server.renumber({5: 3}, later.append)
    may_end.set()
    assert eventually(lambda: not server.holding()) and later == [3]


def test_ranks_join_and_are_missed(door: Door) -> None:
    first, second = door.join(2), door.join(3)
    assert first.job == second.job == JOB
    assert eventually(lambda: door.server.holding() == {2, 3}) and not first.cut()
    second.close()
    assert eventually(lambda: door.gone == [3]) and eventually(lambda: door.server.holding() == {2})
    door.server.close()
    assert eventually(first.cut)


@pytest.mark.parametrize(("process", "known"), [("pid 7 on node", "pid 7 on node"), ("n" * 99, "n" * 80)])
def test_both_sides_name_their_processes(door: Door, monkeypatch, process: str, known: str) -> None:
    monkeypatch.setattr(handshake, "this_process", lambda: process)
    rank = door.join(1)
    rank.close()
    assert rank.root_process == known
    assert eventually(lambda: door.gone == [1]) and door.processes == {1: known}


def test_one_connection_a_rank(door: Door) -> None:
    first = door.join(1)
    with pytest.raises(LaunchError, match="rank 1 of this job has joined before"):
        door.join(1)
    assert not first.cut() and not door.gone
    first.close()
    assert eventually(lambda: door.gone == [1])
    with pytest.raises(LaunchError, match="has joined before"):
        door.join(1)  # not even after its end: the job has recorded its death


def test_who_does_not_know_the_key_learns_nothing_and_changes_nothing(door: Door) -> None:
    with pytest.raises(ForgedMessageError, match="does not know the key"):
        door.join(1, OTHER)
    stranger = door.knock(Hello(OTHER, 1).message)
    assert len(stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    stranger.sendall(bytes(PROOF_BYTES))
    assert stranger.recv(1) == b""
    assert not door.server.holding() and not door.gone
    door.join(1)


@pytest.mark.parametrize("rank", [0, SIZE, 2**32 - 1])
def test_ranks_that_the_job_does_not_have(door: Door, rank: int) -> None:
    assert door.knock(Hello(KEY, rank).message).recv(1) == b""


def test_a_recorded_proof_is_of_no_use_again() -> None:
    hello = Hello(KEY, 1)
    first, second = (Answer.to(hello.message, KEY, JOB, SIZE) for _ in range(2))
    assert first is not None and second is not None
    proof, job, _ = hello.prove(first.challenge)
    assert first.proven_by(proof) and not second.proven_by(proof) and job == JOB
    with pytest.raises(ForgedMessageError):
        Hello(KEY, 1).prove(first.challenge)  # a challenge that was recorded


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_any_bytes_for_a_hello(message: bytes) -> None:
    known = message[:4] == b"TSJ2" and 0 < struct.unpack_from("!I", message, 4)[0] < SIZE
    assert (Answer.to(message, KEY, JOB, SIZE) is not None) == known


@given(st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES), st.binary(max_size=64))
@settings(max_examples=50)
def test_any_bytes_for_a_challenge_or_proof(challenge: bytes, proof: bytes) -> None:
    with pytest.raises(ForgedMessageError):
        Hello(KEY, 1).prove(challenge)
    answer = Answer.to(Hello(KEY, 1).message, KEY, JOB, SIZE)
    assert answer is not None and not answer.proven_by(proof)


def test_idle_half_and_too_long_messages_hold_up_nobody(door: Door) -> None:
    held = [door.knock(), door.knock(b"TS"), door.knock(Hello(KEY, 1).message), door.knock(os.urandom(100_000))]
    assert door.join(2).job == JOB
    victim = door.join(3)
    victim.close()
    assert eventually(lambda: door.gone == [3])
    assert all(not connection._closed for connection in held)


def test_unproven_connections_are_few_and_short_lived(door: Door, monkeypatch) -> None:
    monkeypatch.setattr(admission, "_PROVE_WITHIN_S", 100.0)
    held = [door.knock() for _ in range(admission._UNPROVEN + SIZE + 20)]
    assert eventually(lambda: len(door.server._admission._unproven) == admission._UNPROVEN + SIZE)
    assert all(connection.recv(1) == b"" for connection in held[:20]), "the oldest went"
    door.join(4)
    monkeypatch.setattr(admission, "_PROVE_WITHIN_S", 0.1)
    late = door.knock()
    assert late.recv(1) == b""


def test_deaths_are_noticed_while_no_descriptors_are_left(door: Door, monkeypatch) -> None:
    victim = door.join(5)

    def refuse(_listener: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", refuse)
        knocking = door.knock()
        victim.close()
        assert eventually(lambda: door.gone == [5])
    assert door.join(6).job == JOB
    knocking.close()


def test_nothing_is_left_of_a_closed_door_and_children_do_not_hold_it_open() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    made = admission.Admission(listener, KEY, JOB, SIZE, lambda connection, rank: None, "a closed door")
    made.start()
    stranger = socket.create_connection(listener.getsockname(), timeout=10.0)
    assert eventually(lambda: len(made._unproven) == 1)
    child = os.fork()
    if not child:
        os._exit(listener.fileno() != -1)
    assert os.waitpid(child, 0)[1] == 0
    made.close()
    assert listener.fileno() == -1 and stranger.recv(1) == b""
    assert "a closed door" not in {thread.name for thread in threading.enumerate()}
