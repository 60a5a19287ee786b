# SPDX-License-Identifier: MIT
"""Results are kept with their scope, and never read half-written."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tilescale.errors import UsageError
from tilescale.tuning.database import Database, DatabaseKey, Trial, Tuned
from tilescale.tuning.files import save

KEY = DatabaseKey(
    "matmul", "ab12", '{"M": 64}', "cd34", "h200-sxm-8 ef56", "2 x NVIDIA H200", (("tilescale", "0.1.0"),)
)
TRIALS = (Trial({"block": 64}, 3.0, 4.5, (4.0, 5.0)), Trial({"block": 32}, 9.0), Trial({"block": 0}, failed="zero"))
FOUND = Tuned({"block": 64}, 4.5, False, "2026-11-22T10:00:00+00:00", TRIALS)


def test_what_is_written_is_read(tmp_path: Path):
    database = Database(tmp_path / "new" / "folder")
    assert database.read(KEY) is None
    database.write(KEY, FOUND)
    assert database.read(KEY) == FOUND
    ((key, result),) = database.all()
    assert key["program"] == "matmul" and result["config"] == {"block": 64}


@pytest.mark.parametrize("name", [field.name for field in fields(DatabaseKey)])
def test_a_result_holds_for_its_own_key_alone(tmp_path: Path, name: str):
    database = Database(tmp_path)
    database.write(KEY, FOUND)
    other = (("tilescale", "0.2.0"),) if name == "versions" else "other"
    assert database.read(replace(KEY, **{name: other})) is None


NAN = '{"config": {}, "us": "NaN", "simulated": false, "date": "", "trials": []}'


LISTS = '{"key": {}, "config": [], "us": 1.0, "simulated": false, "date": "", "trials": [{"config": 3}], "kept": true}'
BROKEN = ["", "{", "[]", '{"config": {}}', '{"trials": [3]}', "[" * 100_000, NAN, LISTS]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_result_is_found_again(tmp_path: Path, text: str):
    database = Database(tmp_path)
    database.write(KEY, FOUND)
    (path,) = tmp_path.glob("*.json")
    path.write_text(text)
    assert database.read(KEY) is None
    database.write(KEY, FOUND)
    assert database.read(KEY) == FOUND


def test_a_link_to_a_device_is_no_result(tmp_path: Path):
    database = Database(tmp_path)
    database.write(KEY, FOUND)
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert database.read(KEY) is None and list(database.all()) == []
    database.write(KEY, FOUND)
    assert database.read(KEY) == FOUND and not path.is_symlink()


def test_writers_beside_one_another_leave_a_whole_file(tmp_path: Path):
    database, seen = Database(tmp_path), []
    found = [replace(FOUND, us=float(n + 1), trials=TRIALS * (20 * n + 1)) for n in range(4)]
    database.write(KEY, found[0])

    def write(mine: Tuned) -> None:
        for _ in range(10):
            database.write(KEY, mine)
            seen.append(database.read(KEY))

    threads = [threading.Thread(target=write, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40 and all(read in found for read in seen)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "nothing else stays"


def test_a_folder_that_nobody_may_write_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written.*\n.*TILESCALE_CACHE_DIR"):
        save(tmp_path / "file" / "x.json", "{}")
