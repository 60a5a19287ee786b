# SPDX-License-Identifier: MIT
"""Settings are parsed strictly, and only from their own variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilescale.errors import UsageError
from tilescale.settings import Settings, settings


def test_defaults_and_values() -> None:
    assert Settings.from_env({}) == Settings.from_env({"TILESCALE_EMULATE": "", "RANK": "x"}) == Settings()
    env = {
        "TILESCALE_TIMEOUT_S": "2.5",
        "TILESCALE_MACHINE": "h200-sxm-8",
        "TILESCALE_EMULATE": "Yes",
        "TILESCALE_PROGRESS": "0",
        "TILESCALE_CHECK": "races, uninitialized",
        "TILESCALE_SCHEDULE_SEED": "7",
        "TILESCALE_CACHE_DIR": "/tmp/kept",
    }
    wanted = {"check": ("races", "uninitialized"), "schedule_seed": 7, "progress": "off", "emulate": True}
    assert Settings.from_env(env) == Settings(timeout_s=2.5, machine="h200-sxm-8", cache=Path("/tmp/kept"), **wanted)


@pytest.mark.parametrize(
    ("variable", "text", "valid"),
    [
        ("TILESCALE_TIMEOUT_S", "10min", "above 0"),
        ("TILESCALE_TIMEOUT_S", "0", "above 0"),
        ("TILESCALE_TIMEOUT_S", "nan", "above 0"),
        ("TILESCALE_EMULATE", "maybe", "1, true, yes, on, 0, false, no, off"),
        ("TILESCALE_PROGRESS", "loud", "auto, on or off"),
        ("TILESCALE_CHECK", "races,", "all, none, or names of checks"),
        ("TILESCALE_SCHEDULE_SEED", "-1", "a whole number from 0 on"),
        ("TILESCALE_TRACEBACK", "long", "short or full"),
        ("TILESCALE_CACHE_DIR", "kept", "the absolute path of a folder"),
    ],
)
def test_bad_text_lists_what_is_valid(variable: str, text: str, valid: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.from_env({variable: text})
    assert f"{variable}={text!r}" in str(caught.value) and valid in str(caught.value)


def test_read_once(monkeypatch) -> None:
    settings.cache_clear()
    monkeypatch.setenv("TILESCALE_TIMEOUT_S", "7")
    assert settings().timeout_s == 7
    monkeypatch.setenv("TILESCALE_TIMEOUT_S", "8")
    assert settings().timeout_s == 7
    settings.cache_clear()


def test_a_misspelled_variable_is_an_error_and_variables_of_other_programs_are_none() -> None:
    with pytest.raises(UsageError, match="there is no setting TILESCALE_CHECKS") as caught:
        Settings.from_env({"TILESCALE_CHECKS": "none"})
    assert caught.value.hint == "did you mean 'TILESCALE_CHECK'?"
    store = ("TILESCALE_STORE_FD", "TILESCALE_STORE_PORT")
    others = ("TILESCALE_JOB_KEY", "TILESCALE_RUN", *store, "TILESCALE_ALLOW_NO_KEY", "TILESCALE_USE_VMM")
    assert Settings.from_env(dict.fromkeys(others, "1")) == Settings()
