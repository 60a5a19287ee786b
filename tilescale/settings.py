# SPDX-License-Identifier: MIT
"""The only place that reads and writes the environment: TILESCALE_* variables, parsed once, strictly, into `Settings`.

Variables that a launcher sets (RANK, OMPI_COMM_WORLD_SIZE, ...) are read by `tilescale.comm.launchers` instead.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tilescale.errors import UsageError, did_you_mean

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    Attributes:
        timeout_s: longest time in seconds that a rank waits for the others (TILESCALE_TIMEOUT_S).
        machine: name or file of the default machine, None to leave the choice to the caller (TILESCALE_MACHINE).
        emulate: run programs on the emulator even where GPUs are present (TILESCALE_EMULATE).
        heap: name of the provider of symmetric memory, None for the first that works (TILESCALE_HEAP).
        heap_bytes: bytes to which the symmetric heap of a rank may grow, None for as much as makes sense on its device
            (TILESCALE_HEAP_BYTES).
        share_gpus: let ranks of a node share its GPUs in turn where there are more ranks (TILESCALE_SHARE_GPUS).
        wait_s: longest time in seconds that a kernel waits for another device (TILESCALE_WAIT_S).
        plugin: let serving engines that load the plugins of this package use its operators (TILESCALE_PLUGIN).
        progress: progress bars, "on", "off", or "auto" for "on a terminal" (TILESCALE_PROGRESS).
        check: checks of the emulator where the caller passes none: "all", "none", or names of checks with commas
            between them (TILESCALE_CHECK).
        schedule_seed: the interleaving in which the emulator runs units where the caller passes none, None for
            round-robin (TILESCALE_SCHEDULE_SEED).
        traceback: what an uncaught error prints, "short" for its message and the user's lines, on the rank of a job
            that fails first, "full" for Python's traceback, on every rank (TILESCALE_TRACEBACK).
        cache: folder of this user's measurements and tuning results (TILESCALE_CACHE_DIR).
    """

    timeout_s: float = 600.0
    machine: str | None = None
    emulate: bool = False
    share_gpus: bool = False
    wait_s: float = 30.0
    heap: str | None = None
    heap_bytes: int | None = None
    plugin: bool = False
    progress: str = "auto"
    check: tuple[str, ...] = ("all",)
    schedule_seed: int | None = None
    traceback: str = "short"
    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tilescale")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """The settings that `env` holds; an unset or empty variable keeps its default.

        Raises UsageError for a value that is not one of the valid ones.
        """
        values: dict[str, Any] = {}
        for name, (variable, parse, valid) in _VARIABLES.items():
            text = env.get(variable, "").strip()
            if not text:
                continue
            try:
                values[name] = parse(text)
            except ValueError:
                raise UsageError(f"{variable}={text!r} is not understood", hint=f"set it to {valid}") from None
        _check_names(env)
        return cls(**values)


def _check_names(env: Mapping[str, str]) -> None:
    """Raise UsageError for a variable whose name is nearly that of a setting; others may be of other programs."""
    known = [variable for variable, _, _ in _VARIABLES.values()]
    for variable in env:
        if variable in known or not variable.startswith("TILESCALE_"):
            continue
        if guess := did_you_mean(variable, known, 0.87):
            raise UsageError(f"there is no setting {variable}", hint=guess.strip())


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _progress(text: str) -> str:
    if text.lower() == "auto":
        return "auto"
    return "on" if _switch(text) else "off"


def _traceback(text: str) -> str:
    if text.lower() not in ("short", "full"):
        raise ValueError(text)
    return text.lower()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"\w+", name) for name in names):
        raise ValueError(text)
    return names


def _number(text: str) -> int:
    if re.fullmatch(r"[0-9]+", text) is None:
        raise ValueError(text)
    return int(text)


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(text)
    return path


_UNITS = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)\s*([KMGT]iB|)", text)
    if found is None or int(found[1]) == 0:
        raise ValueError(text)
    return int(found[1]) << _UNITS[found[2]]


_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "timeout_s": ("TILESCALE_TIMEOUT_S", _seconds, "a number of seconds above 0, e.g. 600"),
    "machine": ("TILESCALE_MACHINE", str, "a machine name or the path of a description"),
    "emulate": ("TILESCALE_EMULATE", _switch, f"one of {', '.join(_TRUE + _FALSE)}"),
    "share_gpus": ("TILESCALE_SHARE_GPUS", _switch, f"one of {', '.join(_TRUE + _FALSE)}"),
    "heap": ("TILESCALE_HEAP", str, "the name of a heap provider, e.g. cuda_vmm"),
    "heap_bytes": ("TILESCALE_HEAP_BYTES", _bytes, "a number of bytes, or one with KiB, MiB, GiB or TiB, e.g. 16GiB"),
    "wait_s": ("TILESCALE_WAIT_S", _seconds, "a number of seconds above 0, e.g. 30"),
    "plugin": ("TILESCALE_PLUGIN", _switch, f"one of {', '.join(_TRUE + _FALSE)}"),
    "progress": ("TILESCALE_PROGRESS", _progress, "auto, on or off"),
    "check": ("TILESCALE_CHECK", _names, "all, none, or names of checks with commas between them, e.g. races"),
    "schedule_seed": ("TILESCALE_SCHEDULE_SEED", _number, "a whole number from 0 on"),
    "traceback": ("TILESCALE_TRACEBACK", _traceback, "short or full"),
    "cache": ("TILESCALE_CACHE_DIR", _folder, "the absolute path of a folder, e.g. ~/.cache/tilescale"),
}


@cache
def settings() -> Settings:
    """The settings of this process, read from the environment at the first call. Raises UsageError for bad values."""
    return Settings.from_env(os.environ)


def set_default(variable: str, value: str) -> None:
    """Give a variable that another library reads a value, unless the user gave it one."""
    os.environ.setdefault(variable, value)
