# SPDX-License-Identifier: MIT
"""Compiled kernels are taken from a cache only if no other user could have put them there."""

from __future__ import annotations

import grp
import os
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tilelang_core.native
from tilescale.backends.cuda.running import native, toolchain
from tilescale.backends.cuda.running.toolchain import check_cache, objection
from tilescale.errors import UntrustedCacheError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "one" / "cache"
    made.mkdir(parents=True)
    for part in (made, made.parent):
        part.chmod(0o755)
    return made


def test_a_folder_of_ones_own_also_below_tmp(folder: Path) -> None:
    assert objection(folder) is None
    assert objection(folder / "made" / "later") is None


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("mode", "who"), [(0o777, "all users"), (0o757, "all users"), (0o775, "group 12345")])
def test_every_part_of_the_path_counts(folder: Path, monkeypatch, depth: int, mode: int, who: str) -> None:
    monkeypatch.setattr(toolchain, "_is_own_group", lambda _number: mode != 0o775)
    part = [folder, folder.parent][depth]
    part.chmod(mode)
    said = objection(folder)
    assert said is not None and f"can write to {part} (mode 0{mode:o})" in said
    assert said.startswith(who.split()[0])


def test_others_cannot_move_what_is_not_theirs_in_a_sticky_folder(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert objection(folder) is None


def test_links_are_followed_and_looked_at_themselves(folder: Path) -> None:
    link = folder / "link"
    target = folder / "target"
    target.mkdir()
    link.symlink_to(target)
    assert objection(link) is None
    target.chmod(0o777)
    assert objection(link) == f"all users can write to {target} (mode 0777)"


BELOW = "0.1.15/linux-x86_64/kernels", "0.1.15/linux-x86_64/.staging", "lowered", "native"


@pytest.mark.parametrize("below", BELOW)
def test_what_lies_in_the_cache_counts(folder: Path, below: str) -> None:
    """TileLang and this package make folders in it, which may be older than the modes of the cache."""
    (folder / below).mkdir(parents=True)
    file = folder / below / "kernel_lib.so"
    file.touch()
    for part in (folder / below, file):
        part.chmod(0o777)
        assert objection(folder) == f"all users can write to {part} (mode 0777)"
        part.chmod(0o755)
    assert objection(folder) is None


def test_a_link_that_was_planted_in_the_cache(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "key"
    theirs.mkdir(parents=True)
    (folder / "kernels").symlink_to(theirs)
    (theirs / "back").symlink_to(folder)
    theirs.parent.chmod(0o777)
    assert objection(folder) == f"all users can write to {theirs.parent} (mode 0777)"
    theirs.parent.chmod(0o755)
    assert objection(folder) is None, "also where links lead in a circle"


def test_a_folder_of_another_user(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid == 0:
        assert objection(folder) is None, "root may do anything anyhow"
        os.chown(folder, 54321, -1)
    said = objection(folder)
    assert said is not None and "belongs to user" in said


def test_a_group_of_the_user_alone(monkeypatch) -> None:
    own, shared = ("ann", "x", 1000, []), ("ann", "x", 1000, ["ann", "bob"])
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: pwd.struct_passwd(("ann", "x", 1000, 1000, "", "", "")))
    assert toolchain._is_own_group(0)
    for group, number, expected in ((own, 1000, True), (shared, 1000, False), (own, 1001, False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _number, group=group: grp.struct_group(group))
        assert toolchain._is_own_group(number) == expected


@pytest.mark.parametrize("part", ["", native.FOLDER])
def test_no_library_of_the_host_is_loaded_then(folder: Path, monkeypatch, part: str) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(folder))
    (folder / part).mkdir(exist_ok=True)
    (folder / part).chmod(0o777)
    with pytest.raises(UntrustedCacheError, match="would run as this user"):
        native.loaded_code.__wrapped__()


def test_threads_that_compile_the_same_library_do_not_collide(folder: Path, monkeypatch) -> None:
    both = threading.Barrier(2)

    def compiled(command: list[str], **_: object) -> None:
        Path(command[-1]).write_bytes(b"library")
        both.wait(60)

    monkeypatch.setattr(tilelang_core.native.subprocess, "run", compiled)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(tilelang_core.native._compile, "", (), folder / "new" / "x.so") for _ in range(2)]
    assert [each.result() for each in made] == [None, None]
    assert [path.name for path in (folder / "new").iterdir()] == ["x.so"]


def test_nothing_is_compiled_or_loaded_then(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(folder))
    check_cache()
    folder.chmod(0o777)
    with pytest.raises(UntrustedCacheError, match="would run as this user") as caught:
        check_cache()
    assert "TILELANG_CACHE_DIR" in caught.value.hint
