# SPDX-License-Identifier: MIT
"""Ranks when something around them breaks: every wait ends, with a reason. The ranks are in this process."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from tests.comm.conftest import ROOT
from tilescale.comm.launchers import Joined
from tilescale.comm.open_session import open_session
from tilescale.comm.session import Session
from tilescale.comm.store_client import StoreClient
from tilescale.comm.team import Team
from tilescale.comm.trust import same_user
from tilescale.comm.trust.key import JobKey
from tilescale.comm.trust.key_exchange import KeyServer, fetch
from tilescale.comm.worker import Worker
from tilescale.comm.world import _check_versions
from tilescale.errors import LaunchError, RankFailedError, RankMismatchError, UsageError

KEY = JobKey(b"ours")


class Stopped(HashStore):
    """A store that stops answering from the first `set` of a name on."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.answers = name, threading.Event()

    def set(self, name: str, value: bytes) -> None:
        if name == self.name:
            self.answers.wait(60)
        super().set(name, value)


def never() -> bool:
    return False


# -- calls that block --------------------------------------------------------------------------------------------------


def test_a_call_gives_what_it_gives() -> None:
    worker = Worker("test")
    assert worker.call(divmod, 7, 2, limit_s=5.0, hopeless=never) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        worker.call(divmod, 7, 0, limit_s=5.0, hopeless=never)


def test_who_waits_can_give_up() -> None:
    blocked, hopeless = threading.Event(), threading.Event()
    threading.Timer(0.1, hopeless.set).start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        Worker("test").call(blocked.wait, 60, limit_s=60.0, hopeless=hopeless.is_set)
    with pytest.raises(TimeoutError):
        Worker("test").call(blocked.wait, 60, limit_s=0.1, hopeless=never)
    assert time.monotonic() - start < 30
    blocked.set()


def test_a_store_that_is_stopped_is_asked_once() -> None:
    """Rank 0 gets SIGSTOP: the others must wait for it only once."""
    store = Stopped("x")
    client = StoreClient(store, 0.2)
    client.root_name = "rank 0 (pid 7 on node0)"
    with pytest.raises(RankFailedError, match=r"no answer from rank 0 \(pid 7 on node0\).* for 0.2 s: it is stopped"):
        client.set("x", b"")
    client.limit_s = 60.0
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="it is stopped"):
        client.get("y")
    assert time.monotonic() - start < 30
    store.answers.set()


def test_a_connection_that_is_cut_ends_a_call_that_blocks() -> None:
    store, cut = Stopped("x"), threading.Event()
    client = StoreClient(store, 60.0)
    client.root_cut = cut.is_set
    threading.Timer(0.1, cut.set).start()
    with pytest.raises(RankFailedError, match="rank 0 disappeared"):
        client.set("x", b"")
    store.answers.set()


def test_a_forked_child_takes_no_part(run_ranks) -> None:
    client = StoreClient(HashStore(), 5.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.set("x", b"")
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # no code of pytest may run
    os.close(writing)
    os.waitpid(child, 0)
    assert f"process {child} was forked by a rank (process {os.getpid()})" in os.read(reading, 1000).decode()
    os.close(reading)


# -- joining -----------------------------------------------------------------------------------------------------------


def joined(store: HashStore, rank: int, key: JobKey | None = KEY, size: int = 2) -> Joined:
    return Joined("test", rank, size, node="n", host="127.0.0.1", store=store, key=key)


def both(store: HashStore, *ranks: Joined, timeout_s: float = 20.0) -> list[Session | Exception]:
    """Results of all ranks when they join at the same time."""
    found: list[Session | Exception] = [LaunchError("hung")] * len(ranks)

    def join(number: int) -> None:
        try:
            found[number] = open_session(ranks[number], timeout_s)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[number] = error

    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "that agree on one"])
def test_ranks_join_and_talk(key: JobKey | None) -> None:
    store = HashStore()
    sessions = both(store, joined(store, 0, key), joined(store, 1, key))
    teams = [Team(ranks=(0, 1), rank=rank, _session=session) for rank, session in enumerate(sessions)]
    other: list[list[int]] = []
    thread = threading.Thread(target=lambda: other.append(teams[1].all_gather(1)))
    thread.start()
    assert teams[0].all_gather(0) == [0, 1]
    thread.join(20)
    assert other == [[0, 1]]


def test_clocks_that_jump_end_nothing(monkeypatch) -> None:
    """By a year, to and fro, at every look: only the monotonic clock counts."""
    jumps, own = itertools.cycle((0.0, 31536000.0, -31536000.0)), time.time
    monkeypatch.setattr(time, "time", lambda: own() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))
    test_ranks_join_and_talk(KEY)


def test_another_key_does_not_get_in() -> None:
    """Two jobs on one port: rank 1 of the second comes to rank 0 of the first."""
    store = HashStore()
    first, second = both(store, joined(store, 0), joined(store, 1, JobKey(b"other")))
    assert isinstance(first, Session) and first.status().failure is None
    assert isinstance(second, LaunchError) and "not signed with the job's key" in second.message
    assert "two jobs on one host need a MASTER_PORT each" in (second.hint or "")


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "without"])
def test_two_jobs_on_one_port_do_not_mix(key: JobKey | None) -> None:
    """Set up by hand: rank 1 of the second comes to rank 0 of the first, before rank 1 of the first does."""
    store = HashStore()
    first = replace(joined(store, 0, key), job="/home/a/first.py")
    others = [replace(joined(store, 1, key), job="/home/a/second.py"), replace(joined(store, 2, key, 4), job=first.job)]
    root, *refused = both(store, first, *others)
    assert isinstance(root, Session) and all(isinstance(error, LaunchError) for error in refused)
    assert "rank 1 is of a job of /home/a/second.py, rank 0 at 127.0.0.1 of one of /home/a/first.py" in str(refused[0])
    assert "rank 2 is of a job of 4 ranks, rank 0 at 127.0.0.1 of one of 2 ranks" in str(refused[1])
    (own,) = both(store, replace(others[0], job=first.job))
    assert isinstance(own, Session), "the job's own rank still gets in"


def test_a_second_process_for_a_rank_is_refused_and_harms_nobody() -> None:
    """A plain `python` that calls `init` inside of a rank has that rank's environment."""
    store = HashStore()
    root, other = both(store, joined(store, 0), joined(store, 1))
    again, root_again = both(store, joined(store, 1), joined(store, 0))
    assert isinstance(again, LaunchError) and "rank 1 of this job has joined before" in again.message
    assert isinstance(root_again, LaunchError) and "another process is rank 0 of this job already" in root_again.message
    assert isinstance(root, Session) and isinstance(other, Session)
    assert root.status().failure is None is other.status().failure


def test_rank_0_that_does_not_come() -> None:
    (alone,) = both(HashStore(), joined(HashStore(), 1), timeout_s=1.0)
    assert isinstance(alone, LaunchError) and "has not said within 1 s where it is" in alone.message


def test_ranks_with_different_versions() -> None:
    same = {"tilescale": "1.0", "torch": "2.10"}
    _check_versions({"rank 0": same, "rank 1": dict(same)})
    with pytest.raises(RankMismatchError, match=r"rank 0 runs torch 2.10, rank 2 \(pid 9 on b\) runs 2.9"):
        _check_versions({"rank 0": same, "rank 1": same, "rank 2 (pid 9 on b)": same | {"torch": "2.9"}})


# -- one host, one user ------------------------------------------------------------------------------------------------


def test_the_key_is_handed_to_processes_of_the_user_alone(monkeypatch) -> None:
    server = KeyServer()
    assert fetch(server.name).tag(b"x") == server.key.tag(b"x")
    monkeypatch.setattr(same_user, "is_ours", lambda connection: False)
    with pytest.raises(PermissionError, match="another user"):  # whose socket another process put into the store
        fetch(server.name)
    with same_user_connection(server.name) as connection:
        assert connection.recv(32) == b"", "rank 0 asks as well"
    monkeypatch.undo()
    assert fetch(server.name).tag(b"x") == server.key.tag(b"x")


def test_a_rank_0_that_ends_hands_no_key_over() -> None:
    listener, name = same_user.listen(socket.SOCK_STREAM)
    threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
    with listener, pytest.raises(ConnectionError, match="rank 0 has ended, or runs as another user"):
        fetch(name)


def same_user_connection(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect("\0" + name)
    return connection


def test_the_kernel_says_whose_process_it_is() -> None:
    listener, name = same_user.listen(socket.SOCK_STREAM)
    with listener, same_user_connection(name) as connection:
        assert same_user.is_ours(connection)
    with pytest.raises(OSError):
        same_user.connect(name, socket.SOCK_STREAM)
    with pytest.raises(OSError):
        same_user.connect("x" * 1000, socket.SOCK_STREAM)


def test_the_page_has_every_fault_that_was_tried() -> None:
    tried = re.findall(r'Fault\("([^"]+)"', (ROOT / "benchmarks/faults.py").read_text())
    rows = (ROOT / "docs/faults.md").read_text().replace("\\|", "|").splitlines()
    assert len(tried) > 15 and tried == [row.split(" | ")[0].removeprefix("| ") for row in rows if " s | " in row]
