# SPDX-License-Identifier: MIT
"""The key of a job, a secret of its ranks. They sign all their messages with it.

A launcher puts it into the environment of the ranks, never on a command line, which every user of a machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from tilescale.errors import LaunchError

KEY, KEY_FILE, NO_KEY = "TILESCALE_JOB_KEY", "TILESCALE_JOB_KEY_FILE", "TILESCALE_ALLOW_NO_KEY"
"""Environment variables: the key as 64 hexadecimal digits, a file that holds it so, and 1 to run without one."""

KEY_BYTES = 32
TAG_BYTES = hashlib.sha256().digest_size

_LONGEST_FILE = 4096


def new_key() -> str:
    """A new key, as `TILESCALE_JOB_KEY` holds it."""
    return secrets.token_hex(KEY_BYTES)


class JobKey:
    """A secret, and what can be proven with it. Neither its text nor its pickle shows the secret."""

    def __init__(self, secret: bytes):
        self._secret = secret

    @property
    def is_public(self) -> bool:
        """Whether all jobs that run without a key have this one, so that it does not distinguish them."""
        return not self._secret

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> JobKey | None:
        """The key that `env` holds or names the file of; None if it does neither.

        Raises LaunchError for text that is not a key, and for a file that others may read or that belongs to another
        user.
        """
        if env.get(KEY):
            return cls.from_text(env[KEY])
        if env.get(KEY_FILE):
            return cls.from_text(_private_text(Path(env[KEY_FILE])), env[KEY_FILE])
        return cls(b"") if env.get(NO_KEY) == "1" else None

    @classmethod
    def of_hosts(cls, env: Mapping[str, str]) -> JobKey:
        """The key of a job on several hosts, as `from_env`. Raises LaunchError also where there is none."""
        key = cls.from_env(env)
        if key is None:
            raise LaunchError(
                "a job on several hosts has no key: without one, any process that reaches its ports could join",
                hint=f"set {KEY_FILE} on all nodes to a file with the same key and mode 0600, made by: (umask 077; "
                f"openssl rand -hex 32 > job.key); or {KEY} to the key itself; or {NO_KEY}=1 where the network is "
                "yours alone",
            )
        return key

    @classmethod
    def from_text(cls, text: str, origin: str = KEY) -> JobKey:
        """The key that hexadecimal digits stand for. Raises LaunchError, which names their origin."""
        try:
            secret = bytes.fromhex(text.strip())
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise LaunchError(
                f"{origin} holds no key: {2 * KEY_BYTES} hexadecimal digits are wanted",
                hint=f"make one with: openssl rand -hex {KEY_BYTES}",
            )
        return cls(secret)

    def tag(self, *parts: bytes | memoryview) -> bytes:
        """HMAC-SHA256 (RFC 2104) over the parts, each after its length, so that none can pass for a part of another."""
        found = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
        return found.digest()

    def accepts(self, tag: bytes | memoryview, *parts: bytes | memoryview) -> bool:
        """Whether `tag` was made of these parts with this key."""
        return hmac.compare_digest(tag, self.tag(*parts))

    def of_job(self, nonce: bytes) -> JobKey:
        """The key of the one job that drew this nonce: signatures of another job with the same key are void."""
        return JobKey(self.tag(b"job", nonce))

    def __repr__(self) -> str:
        return "JobKey(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key does not travel in pickles")


def _private_text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"{KEY_FILE}={path} cannot be read: {error.strerror}") from error
    with open(descriptor, encoding="ascii", errors="replace") as file:
        found = os.fstat(descriptor)
        if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(
                f"{KEY_FILE}={path} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to user {found.st_uid}: "
                "others may know the key in it",
                hint=f"make a new key in a file of your own with mode 0600: (umask 077; openssl rand -hex {KEY_BYTES} "
                f"> {path})",
            )
        return file.read(_LONGEST_FILE)
