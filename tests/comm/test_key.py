# SPDX-License-Identifier: MIT
"""The key of a job: its sources, its permissions, and the signed messages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilescale.comm.trust.key import KEY, KEY_FILE, NO_KEY, JobKey, new_key
from tilescale.comm.trust.records import seal, unseal, unseal_one
from tilescale.errors import ForgedMessageError, LaunchError

OURS, OTHER = JobKey(b"ours" * 8), JobKey(b"other" * 8)


def test_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    text = new_key()
    expected = JobKey(bytes.fromhex(text)).tag(b"x")
    file = tmp_path / "job.key"
    file.write_text(text + "\n")
    file.chmod(0o600)
    for env in ({KEY: text}, {KEY_FILE: str(file)}, {KEY: text, KEY_FILE: "not looked at"}):
        key = JobKey.from_env(env)
        assert key is not None and key.tag(b"x") == expected
    assert JobKey.from_env({}) is None and JobKey.from_env({NO_KEY: "1"}) is not None
    assert text != new_key()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "job.key"
    file.write_text(new_key())
    file.chmod(mode)
    with pytest.raises(LaunchError, match=f"has mode 0{mode:o}.*others may know the key"):
        JobKey.from_env({KEY_FILE: str(file)})


@pytest.mark.parametrize("text", ["secret", "00" * 31, "00" * 33, "zz" * 32])
def test_text_that_is_no_key(text: str) -> None:
    with pytest.raises(LaunchError, match="64 hexadecimal digits") as caught:
        JobKey.from_env({KEY: text})
    assert text not in str(caught.value), "a key that is wrong by one digit must not be in a log"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        JobKey.from_env({KEY_FILE: str(tmp_path / "none")})


def test_a_key_shows_itself_to_nobody() -> None:
    assert "ours" not in repr(OURS)
    with pytest.raises(TypeError, match="does not travel"):
        pickle.dumps(OURS)


def test_parts_cannot_be_moved_between_each_other() -> None:
    tags = [OURS.tag(*parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"ab", b"c", b""))]
    assert len(set(tags)) == len(tags)


def test_every_job_has_a_key_of_its_own() -> None:
    assert OURS.of_job(b"one").tag(b"x") != OURS.of_job(b"two").tag(b"x") != OURS.tag(b"x")


# -- signed records ----------------------------------------------------------------------------------------------------


@given(st.text(), st.integers(0, 2**32 - 1), st.lists(st.binary(), min_size=1))
def test_records_come_back(name: str, rank: int, payloads: list[bytes]) -> None:
    data = b"".join(seal(OURS, name, rank, payload) for payload in payloads)
    found = unseal(OURS, name, data)
    assert [(r, bytes(payload)) for r, payload in found] == [(rank, payload) for payload in payloads]


@given(st.data(), st.binary(max_size=40))
def test_one_changed_byte_is_found(data: st.DataObject, payload: bytes) -> None:
    record = bytearray(seal(OURS, "name", 3, payload))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ForgedMessageError):
        unseal(OURS, "name", bytes(record))


@given(st.binary(min_size=1))
@example(b"\xff" * 44)  # a length of 2**64 - 1
@example(b"\0" * 44)
def test_what_nobody_signed_is_refused(data: bytes) -> None:
    with pytest.raises(ForgedMessageError, match="no rank of this job has written it"):
        unseal(OURS, "name", data)


def test_replays_elsewhere_are_refused() -> None:
    record = seal(OURS, "call/0,1/7", 1, b"payload")
    for key, name in ((OURS, "call/0,1/8"), (OTHER, "call/0,1/7"), (OURS.of_job(b"another job"), "call/0,1/7")):
        with pytest.raises(ForgedMessageError):
            unseal(key, name, record)


@pytest.mark.parametrize(
    "data", [b"", seal(OURS, "at/1", 2, b""), seal(OURS, "at/1", 1, b"") * 2], ids=["none", "of another", "two"]
)
def test_a_value_has_one_writer(data: bytes) -> None:
    with pytest.raises(ForgedMessageError, match="not one of rank 1"):
        unseal_one(OURS, "at/1", data, writer=1)


def test_nothing_is_unpickled_before_it_is_verified(run_ranks) -> None:
    """Another user of the host appends a pickle to the log of a call, which used to run on every rank."""
    ran: list[int] = []

    class Attack:
        def __reduce__(self):
            return ran.append, (1,)

    def work(team):
        store = team._session.transport.client.store
        if team.rank == 0:
            forged = pickle.dumps(Attack())
            store.append("call/0,1/0", forged)
            store.append("failures", forged)
        team.barrier()

    for error in run_ranks(2, work):
        assert isinstance(error, ForgedMessageError), error
    assert not ran
