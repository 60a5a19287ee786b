# SPDX-License-Identifier: MIT
"""Launchers of several nodes, as threads of this process: rendezvous, assignment of ranks, the first failure."""

from __future__ import annotations

import collections
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tilescale.comm.local_job import LocalJob
from tilescale.comm.nodes import PORT, JobEnded, LauncherRendezvous, NodeFailure, OtherNodes, join, rendezvous_of
from tilescale.comm.nodes.channel import NodeChannel
from tilescale.comm.rank_process import NodePlacement
from tilescale.comm.trust.handshake import Hello, this_process
from tilescale.comm.trust.key import KEY, NO_KEY, JobKey
from tilescale.errors import ForgedMessageError, LaunchError, UsageError

TEXT = "ab" * 32
GUARD_S = 280.0


def rendezvous(nodes: int = 2) -> LauncherRendezvous:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return LauncherRendezvous("127.0.0.1", server.getsockname()[1], 0, nodes, JobKey.from_text(TEXT))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results or errors of concurrent calls that wait for each other."""
    found: list[Any] = [None] * len(calls)

    def make(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:  # the test looks at it
            found[number] = error

    threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    return found


def met(*ranks: int, where: LauncherRendezvous | None = None) -> list[OtherNodes]:
    where = where or rendezvous(len(ranks))
    nodes = [replace(where, node=node) for node in range(len(ranks))]
    return at_once(*(lambda node=node, n=n: join(node, n, GUARD_S) for node, n in zip(nodes, ranks, strict=True)))


def test_ranks_are_given_out_in_the_order_of_nodes() -> None:
    nodes = met(2, 3, 1)
    assert [(node.first, node.size) for node in nodes] == [(0, 6), (2, 6), (5, 6)]
    assert nodes[0].reserved is not None and {node.ports for node in nodes} == {nodes[0].reserved.ports}
    assert nodes[1].reserved is None
    for node in nodes:
        node.ended()
    assert [node.news.get(timeout=GUARD_S) for node in nodes] == [JobEnded()] * 3


@pytest.mark.parametrize("origin", [0, 1])
def test_the_first_failure_is_heard_everywhere_else(origin: int) -> None:
    nodes = met(1, 1, 1)
    nodes[2].ended()
    nodes[origin].failed(NodeFailure(7, "rank fails"))
    others = [node for number, node in enumerate(nodes) if number != origin]
    assert [node.news.get(timeout=GUARD_S) for node in others] == [NodeFailure(7, "rank fails")] * 2
    others[0].failed(NodeFailure(8, "follows from it"))
    assert nodes[origin].news.empty() and others[1].news.empty()


def test_a_node_that_vanishes_fails_the_job() -> None:
    nodes = met(1, 1, 1)
    nodes[1].close()
    for other in (0, 2):
        found = nodes[other].news.get(timeout=GUARD_S)
        assert found.code == 69 and found.text.startswith(f"node 1 is gone (launcher: {this_process()}): ")


def test_the_same_place_serves_again() -> None:
    """`tilescale run --doctor` starts another job there after one that has failed."""
    where = rendezvous()
    for _ in range(2):
        nodes = met(1, 1, where=where)
        assert [node.size for node in nodes] == [2, 2]
        nodes[1].failed(NodeFailure(1, "fails"))
        assert nodes[0].news.get(timeout=GUARD_S).code == 1
        nodes[1].close()
        after = waiting(lambda: join(replace(where, node=1), 1, GUARD_S))  # before node 0 has left
        nodes[0].close()
        found = at_once(lambda: join(where, 1, GUARD_S), after)
        assert [node.size for node in found] == [2, 2]
        for node in found:
            node.close()


def test_node_0_that_vanishes_fails_the_job() -> None:
    nodes = met(1, 1)
    nodes[0].close()
    assert nodes[1].news.get(timeout=GUARD_S).text.startswith(f"node 0 is gone (launcher: {this_process()}): ")


def waiting(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call that waits for others; calling the returned function yields its result or error."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(at_once(call)), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(GUARD_S)
        return found[0]

    return result


def test_another_key_is_refused_by_both_sides() -> None:
    where = rendezvous()
    hub = waiting(lambda: join(where, 1, GUARD_S))
    with pytest.raises(LaunchError, match="does not know the key"):
        join(replace(where, node=1, key=JobKey.from_text("cd" * 32)), 1, GUARD_S)
    join(replace(where, node=1), 1, GUARD_S)
    assert hub().size == 2


def test_a_number_of_a_node_is_given_once() -> None:
    where = rendezvous(3)
    again = replace(where, node=1)
    hub = waiting(lambda: join(where, 1, GUARD_S))
    first, second = (waiting(lambda: join(again, 1, GUARD_S)) for _ in range(2))
    join(replace(where, node=2), 1, GUARD_S)
    refused, joined = sorted((first(), second()), key=lambda found: not isinstance(found, LaunchError))
    assert "node 1 of this job has joined before" in str(refused)
    assert (hub().size, joined.first) == (3, 1)


def test_nodes_that_do_not_come_are_named() -> None:
    with pytest.raises(LaunchError, match=r"nodes \[1, 2\] have not come"):
        join(rendezvous(3), 1, 0.01)


def knocked(where: LauncherRendezvous, words: bytes) -> socket.socket:
    """A stranger's connection, made as soon as node 0 listens."""
    while True:
        try:
            stranger = socket.create_connection((where.host, where.port))
        except ConnectionRefusedError:
            continue
        stranger.sendall(words)
        return stranger


def test_strangers_at_the_door_do_not_hinder() -> None:
    """300 of them, with and without words; the node comes after all."""
    where = rendezvous()
    hub = waiting(lambda: join(where, 1, GUARD_S))
    words = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, Hello(JobKey(b"other"), 1).message)
    strangers = [knocked(where, words[number % 4]) for number in range(300)]
    begin = time.monotonic()
    spoke = join(replace(where, node=1), 1, GUARD_S)
    assert time.monotonic() - begin < 4, "less than a stranger may take to prove something"
    assert (hub().size, spoke.size) == (2, 2)
    for stranger in strangers:
        stranger.close()


def test_a_flood_that_goes_on_does_not_hinder() -> None:
    where, over = rendezvous(), threading.Event()
    hub = waiting(lambda: join(where, 1, GUARD_S))

    def flood() -> None:
        held = collections.deque(maxlen=200)
        while not over.is_set():
            with contextlib.suppress(OSError):  # it was the oldest
                held.append(knocked(where, b"T"))

    knocked(where, b"").close()
    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for thread in floods:
        thread.start()
    spoke = join(replace(where, node=1), 1, GUARD_S)
    assert (hub().size, spoke.size) == (2, 2)
    over.set()


def test_messages_are_signed_numbered_and_short() -> None:
    key = JobKey.from_text(TEXT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent, received = NodeChannel(ours, key, 0, 1, "other"), NodeChannel(theirs, key, 1, 0, "other")
        sent.send(text="one")
        assert received.receive() == {"text": "one"}
        sent.send(text="two")
        copy = theirs.recv(1 << 16, socket.MSG_PEEK)
        assert received.receive() == {"text": "two"}
        ours.sendall(copy)
        with pytest.raises(ForgedMessageError):
            received.receive()
        theirs.settimeout(GUARD_S)
        ours.sendall(b"\xff\xff")
        threading.Timer(0.01, ours.sendall, (b"\xff\xff",)).start()  # the rest comes later
        with pytest.raises(ForgedMessageError, match="4294967295 bytes"):
            received.receive()


def test_nobody_is_at_the_address() -> None:
    with pytest.raises(LaunchError, match="node 1 finds no launcher at 127.0.0.1"):
        join(replace(rendezvous(), node=1), 1, 0.0)
    with pytest.raises(LaunchError, match="node 0 cannot listen at 192.0.2.1"):
        join(replace(rendezvous(), host="192.0.2.1"), 1, 1.0)


@pytest.mark.parametrize(
    ("where", "host", "port"),
    [("node0", "node0", PORT), ("node0:81", "node0", 81), ("[fe80::1]:81", "fe80::1", 81), ("[::1]", "::1", PORT)],
)
def test_addresses(where: str, host: str, port: int) -> None:
    found = rendezvous_of(2, 1, where, {KEY: TEXT})
    assert (found.host, found.port, found.node, found.nodes) == (host, port, 1, 2)


@pytest.mark.parametrize(
    ("node", "where", "env", "said"),
    [
        (None, "h", {KEY: TEXT}, "--nnodes 2 needs --node-rank and --rdzv"),
        (0, None, {KEY: TEXT}, "--nnodes 2 needs --node-rank and --rdzv"),
        (2, "h", {KEY: TEXT}, "--node-rank 2 with --nnodes 2"),
        (0, "h:http", {KEY: TEXT}, "'http' is not a port"),
        (0, "h", {}, "has no key"),
    ],
)
def test_options_that_make_no_sense(node, where, env, said: str) -> None:
    with pytest.raises((UsageError, LaunchError), match=said):
        rendezvous_of(2, node, where, env)
    assert rendezvous_of(2, 0, "h", {NO_KEY: "1"}).nodes == 2


def run_nodes(script: str, *ranks: int) -> tuple[list[LocalJob], list[str]]:
    """Jobs of this shell script on several nodes, and all their lines."""
    lines: list[str] = []
    others = met(*ranks)
    jobs = [
        LocalJob(
            ["sh", "-c", script],
            NodePlacement(n, near.first, near.size, node, "127.0.0.1", near.ports, near.reserved),
            {},
            lambda rank, line, _: lines.append(f"[{rank}] {line}"),
            near,
        )
        for node, (n, near) in enumerate(zip(ranks, others, strict=True))
    ]
    at_once(*(job.run for job in jobs))
    return jobs, lines


@pytest.mark.skipif(sys.platform != "linux", reason="ranks ask Linux to end with their launcher")
def test_jobs_of_two_nodes_end_alike() -> None:
    say = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK"
    jobs, lines = run_nodes(say, 2, 1)
    assert [(job.exit_code, job.error) for job in jobs] == [(0, None)] * 2
    assert sorted(lines) == ["[0] 0 of 3, 0 of 2 on 0", "[1] 1 of 3, 1 of 2 on 0", "[2] 2 of 3, 0 of 1 on 1"]
    # The other ranks end before their launcher kills them.
    jobs, _ = run_nodes("test $RANK = 2 && echo no more >&2 && exit 7; test $RANK != 2", 2, 1)
    assert [job.exit_code for job in jobs] == [7, 7]
    assert str(jobs[1].error) == "rank 2 failed first, with exit code 7: no more"
    assert str(jobs[0].error) == "node 1: rank 2 failed first, with exit code 7: no more"
