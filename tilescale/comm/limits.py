# SPDX-License-Identifier: MIT
"""Which limit of the operating system the last words of a rank point to."""

from __future__ import annotations

import resource

__all__ = ["limit_behind"]

_SIGNS = {
    ("MemoryError", "failed to map segment", "Cannot allocate memory", "std::bad_alloc"): (resource.RLIMIT_AS, "-v"),
    ("Too many open files",): (resource.RLIMIT_NOFILE, "-n"),
}


def limit_behind(said: str) -> str:
    """What to raise, after what a rank said last; empty where no limit is set that would explain it."""
    for signs, (limit, option) in _SIGNS.items():
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and any(sign in said for sign in signs):
            return f" (`ulimit {option}` is {soft >> 10 if option == '-v' else soft} here: raise it)"
    return ""
