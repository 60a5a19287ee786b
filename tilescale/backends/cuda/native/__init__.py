# SPDX-License-Identifier: MIT
"""C code of the host's part of a call. replays.c: calls of programs by form; calls.c: recorded calls of operators, with
Python's functions in python_abi.h."""

from __future__ import annotations

from importlib import resources


def source(name: str) -> str:
    """The text of a file in this folder."""
    return resources.files(__package__).joinpath(name).read_text()
