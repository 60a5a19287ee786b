# SPDX-License-Identifier: MIT
"""Attempts of another user of the host to make a job execute code or accept data, by processes of that user."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tilescale.backends.cuda.running.toolchain import objection
from tilescale.comm import store_server
from tilescale.comm.heap import descriptors
from tilescale.comm.heap.descriptors import Mailbox
from tilescale.comm.trust import key_exchange
from tilescale.comm.trust.key import KEY_BYTES, KEY_FILE, JobKey, new_key
from tilescale.errors import ForgedMessageError, LaunchError

SOMEBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def by_another_user(act: Callable[[], object]) -> str:
    """Result of an action of a process of another user: "done", or its error."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        said = "done"
        try:
            os.setgroups([])
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return said


class Attack:
    """An object that executes code when it is unpickled: it makes a folder."""

    def __init__(self, folder: Path):
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._folder,)


def test_a_pickle_in_the_store_is_not_executed(run_ranks, tmp_path: Path) -> None:
    """Neither the file of a call's records, nor that of failures."""
    folder, store = tmp_path / "executed", store_server.serve("127.0.0.1", 0, timeout_s=20)

    def attack() -> None:
        found = TCPStore("127.0.0.1", store.port, is_master=False)
        for name in ("call/0,1/0", "failures"):
            found.append(name, pickle.dumps(Attack(folder)))

    def work(team) -> None:
        if team.rank == 0:
            assert by_another_user(attack) == "done"
        team.barrier()

    errors = run_ranks(2, work, store=store)
    assert all(isinstance(error, ForgedMessageError) for error in errors), errors
    assert not folder.exists()
    pickle.loads(pickle.dumps(Attack(folder)))
    assert folder.exists(), "the attack is none"


def test_the_key_is_not_handed_over() -> None:
    server = key_exchange.KeyServer()

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + server.name)
            assert connection.recv(KEY_BYTES, socket.MSG_WAITALL) == b""

    assert by_another_user(ask) == "done"
    assert key_exchange.fetch(server.name).tag(b"x") == server.key.tag(b"x")


def test_the_environment_that_holds_the_key_cannot_be_read() -> None:
    environment = f"/proc/{os.getpid()}/environ"
    assert by_another_user(lambda: Path(environment).read_bytes()).startswith("PermissionError")


def test_memory_is_neither_given_nor_taken() -> None:
    mailbox = Mailbox()
    own = os.memfd_create("test")

    def intrude() -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect("\0" + mailbox.name)
        socket.send_fds(connection, [descriptors._MESSAGE.pack(0)], [own])

    try:
        by_another_user(intrude)
        assert mailbox.take([0]) is None
        descriptors.send(mailbox.name, 0, own)
        found = mailbox.take([0])
        assert found is not None
        os.close(found[0])
    finally:
        os.close(own)
        mailbox.close()


def test_memory_is_not_sent_to_them(tmp_path: Path) -> None:
    """They listen where a rank's mailbox should be."""
    read, write = os.pipe()
    end, ended = os.pipe()
    process = os.fork()
    if process == 0:
        os.setuid(SOMEBODY)
        os.close(ended)
        mailbox = Mailbox()
        os.write(write, mailbox.name.encode())
        os.read(end, 1)
        os._exit(0 if mailbox.take([0]) is None else 1)
    name, own = os.read(read, 200).decode(), os.memfd_create("test")
    with pytest.raises(LaunchError, match="another user listens there"):
        descriptors.send(name, 0, own)
    for descriptor in (read, write, end, ended, own):
        os.close(descriptor)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_key_of_theirs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.key"
    file.write_text(new_key())
    file.chmod(0o600)
    assert JobKey.from_env({KEY_FILE: str(file)}) is not None
    os.chown(file, SOMEBODY, SOMEBODY)
    with pytest.raises(LaunchError, match=f"belongs to user {SOMEBODY}"):
        JobKey.from_env({KEY_FILE: str(file)})


def test_kernels_of_theirs_are_not_run(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "kernels"
    cache.mkdir(parents=True)
    assert objection(cache) is None
    kernel = cache / "kernel_lib.so"
    kernel.touch()
    os.chown(kernel, SOMEBODY, SOMEBODY)
    assert objection(cache.parent) == f"{kernel} belongs to user {SOMEBODY}", "put there before others were kept out"
    os.chown(cache.parent, SOMEBODY, SOMEBODY)
    assert objection(cache) == f"{cache.parent} belongs to user {SOMEBODY}"
