# SPDX-License-Identifier: MIT
"""The performance database: the fastest configurations, a file for each program, shapes, machine and versions.

Files are written whole or not at all, so ranks and processes may tune concurrently: the last one's result stays. A file
of another origin is ignored, and the next result replaces it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilescale.cost.records import made, read
from tilescale.settings import settings
from tilescale.tuning.files import save


@dataclass(frozen=True)
class DatabaseKey:
    """Conditions under which a result is valid.

    Attributes:
        program: name of the function.
        source: digest of its source and of all that it uses.
        arguments: that it is specialised for: shapes, types.
        space: digest of the configurations among which was chosen.
        machine: name and digest.
        place: what computed, and on how many ranks.
        versions: of what ran.
    """

    program: str
    source: str
    arguments: str
    space: str
    machine: str
    place: str
    versions: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """A stable hash, 24 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Trial:
    """A configuration and its outcome.

    Attributes:
        config: names of the function's parameters -> values.
        estimated_us: by the cost model; None where it has none.
        us: measured, the median over the rounds on the slowest rank; None for configurations that were left out, or
            failed.
        spread: the fastest and the slowest round.
        failed: why there is no time, if it was tried.
        where: the user's line that failed, where the reason does not say it.
    """

    config: Mapping[str, Any]
    estimated_us: float | None = None
    us: float | None = None
    spread: tuple[float, float] | None = None
    failed: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class Tuned:
    """A result.

    Attributes:
        config: the fastest configuration.
        us: its time in microseconds.
        simulated: whether that is the emulator's time.
        date: ISO, UTC.
        trials: every configuration, the fastest first, those that failed last.
        kept: whether the database had it.
    """

    config: Mapping[str, Any]
    us: float
    simulated: bool
    date: str
    trials: tuple[Trial, ...]
    kept: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Database:
    """Results in a folder."""

    folder: Path

    @classmethod
    def of_user(cls) -> Database:
        """This user's own: `tuned` in the cache that TILESCALE_CACHE_DIR names."""
        return cls(settings().cache / "tuned")

    def read(self, key: DatabaseKey) -> Tuned | None:
        """The result that was kept, if there is one."""
        try:
            found = read(self._path(key))
            del found["key"]
            found["trials"] = [made(Trial, "a trial", trial) for trial in found["trials"]]
            return made(Tuned, "the file", found | {"kept": True})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, key: DatabaseKey, found: Tuned) -> None:
        """Keep a result. Raises UsageError where the folder cannot be written."""
        save(self._path(key), json.dumps({"key": asdict(key), **asdict(found)}, indent=1) + "\n")

    def all(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Keys and results of every file, as they are written."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                text = read(path)
                yield text.pop("key"), text
            except (OSError, ValueError, KeyError):
                continue

    def _path(self, key: DatabaseKey) -> Path:
        return self.folder / f"{key.program}-{key.digest}.json"
