# SPDX-License-Identifier: MIT
"""Completions of a shell."""

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tilescale.cli import main
from tilescale.hda import Machine


def completed(words: list[str], incomplete: str) -> list[str]:
    shell = ShellComplete(main, {}, "tilescale", "_TILESCALE_COMPLETE")
    return [item.value for item in shell.get_completions(words, incomplete) if item.type == "plain"]


@pytest.mark.parametrize("words", [["machine", "show"], ["run", "--machine"]])
def test_names_of_machines_complete(words: list[str]):
    assert completed(words, "") == list(Machine.names())
    assert completed(words, "h200") == ["h200-sxm-8", "h200-sxm-8x4"]
    assert completed(words, "./my") == []


def test_commands_complete():
    assert {"run", "machine", "new", "completion"} <= set(completed([], ""))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_read_a_script(shell: str):
    shown = CliRunner().invoke(main, ["completion", shell])
    assert shown.exit_code == 0 and f"_TILESCALE_COMPLETE={shell}_complete" in shown.output
