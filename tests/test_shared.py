# SPDX-License-Identifier: MIT
"""One process of a run fills a shared folder; after an error the next one does."""

from pathlib import Path

import pytest

from tests.shared import made_once


def test_what_failed_is_made_again_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TESTS_SHARED", str(tmp_path))
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        if len(made) == 1:
            raise OSError("full")

    with pytest.raises(OSError):
        made_once("site", make)
    assert made_once("site", make) == made_once("site", make) == made[1]
    assert len(made) == 2 and made[0] != made[1] and made_once("other", make) == made[2]
