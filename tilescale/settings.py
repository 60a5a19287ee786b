# SPDX-License-Identifier: MIT
"""The only place that reads TILESCALE_* variables: parsed once, strictly, into a frozen `Settings`.

Variables that a launcher sets (RANK, OMPI_COMM_WORLD_SIZE, ...) are read by `tilescale.comm.launchers` instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tilescale.errors import UsageError

__all__ = ["Settings", "settings"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        timeout_s: longest time in seconds that a rank waits for the others (TILESCALE_TIMEOUT_S).
        machine: name or file of the default machine, None to leave the choice to the caller (TILESCALE_MACHINE).
        emulate: run programs on the emulator even where GPUs are present (TILESCALE_EMULATE).
        progress: progress bars, "on", "off", or "auto" for "when a person watches" (TILESCALE_PROGRESS).
    """

    timeout_s: float = 600.0
    machine: str | None = None
    emulate: bool = False
    progress: str = "auto"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """The settings that `env` holds; an unset or empty variable keeps its default.

        Raises UsageError for a value that is not one of the valid ones.
        """
        values: dict[str, Any] = {}
        for field, (variable, parse, valid) in _VARIABLES.items():
            text = env.get(variable, "").strip()
            if not text:
                continue
            try:
                values[field] = parse(text)
            except ValueError:
                raise UsageError(f"{variable}={text!r} is not understood", hint=f"set it to {valid}") from None
        return cls(**values)


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
    if text.lower() not in ("auto", "on", "off"):
        raise ValueError(text)
    return text.lower()


_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "timeout_s": ("TILESCALE_TIMEOUT_S", _seconds, "a number of seconds above 0, e.g. 600"),
    "machine": ("TILESCALE_MACHINE", str, "a machine name or the path of a description"),
    "emulate": ("TILESCALE_EMULATE", _switch, f"one of {', '.join(_TRUE + _FALSE)}"),
    "progress": ("TILESCALE_PROGRESS", _progress, "auto, on or off"),
}


@cache
def settings() -> Settings:
    """The settings of this process, read from the environment at the first call. Raises UsageError for bad values."""
    return Settings.from_env(os.environ)
