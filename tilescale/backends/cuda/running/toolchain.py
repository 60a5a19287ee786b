# SPDX-License-Identifier: MIT
"""The compiler, and trust in compiled kernels: a process runs only kernels of its user, from a cache that no other user
can write."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from tilelang_core.compile import cache_folder, nvcc
from tilescale.errors import UntrustedCacheError

__all__ = ["check_cache", "nvcc", "objection"]


def check_cache(part: str = "") -> None:
    """Raise UntrustedCacheError if another user can change the content of the cache, or of a part of it, before its
    use."""
    folder = cache_folder() / part
    said = objection(folder)
    if said is not None:
        raise UntrustedCacheError(
            f"the cache of compiled kernels is at {folder}, but {said}: what is in there would run as this user",
            hint="set TILELANG_CACHE_DIR to a folder of your own, or let no other user write there: chmod go-w",
        )


_searched: set[Path] = set()
"""Folders in which this process has found no objection at the first check."""


def objection(folder: Path) -> str | None:
    """The reason why other users can change the content of a folder; None if they cannot.

    Each part of the path, of the one that links lead to, and all that lies below has to belong to this user or root,
    and only they may write there. Where the sticky bit is set, as in /tmp, others cannot move files that are not
    theirs. The content is checked once: others cannot get in later.
    """
    paths = _parts(folder) if folder in _searched else _tree(folder)
    found = next(filter(None, map(_objection, paths)), None)
    if found is None:
        _searched.add(folder)
    return found


def _objection(part: Path) -> str | None:
    try:
        found = part.lstat()
    except FileNotFoundError:
        return None  # created later, by this user, in a folder that only this user can write to
    if found.st_uid not in (os.getuid(), 0):
        return f"{part} belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"all users can write to {part} (mode {stat.S_IMODE(found.st_mode):04o})"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"group {found.st_gid} can write to {part} (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _tree(folder: Path) -> Iterator[Path]:
    """The parts of a path, and all files below it, also where links in there lead."""
    roots, seen = [folder], set[str]()
    for root in roots:
        real = os.path.realpath(root)
        if real in seen:
            continue
        seen.add(real)
        yield from _parts(root)
        for top, folders, files in os.walk(real):
            for path in (Path(top, name) for name in (*folders, *files)):
                yield path
                if path.is_symlink():
                    roots.append(path)


def _parts(folder: Path) -> Iterator[Path]:
    for path in dict.fromkeys((Path(os.path.abspath(folder)), Path(os.path.realpath(folder)))):
        yield from (path, *path.parents)


def _is_own_group(number: int) -> bool:
    """Whether a group is root's, or the user's private group, which many systems create with no other members."""
    if number == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and not set(group.gr_mem) - {user.pw_name}
