# SPDX-License-Identifier: MIT
"""`tilescale new`: what it makes runs, is right, and replaces nothing."""

import ast
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.comm.conftest import run_words
from tilescale.cli import main


def new(*words: object) -> Result:
    return CliRunner().invoke(main, ["new", *map(str, words)])


def test_the_program_and_its_test_run(tmp_path: Path):
    made = new("halo_sum", "--folder", tmp_path / "mine")
    assert made.exit_code == 0 and "halo_sum.py && python -m pytest" in made.output
    program, test = tmp_path / "mine/halo_sum.py", tmp_path / "mine/test_halo_sum.py"
    assert sorted(tmp_path.joinpath("mine").iterdir()) == [program, test]
    assert ast.get_docstring(ast.parse(program.read_text())).startswith("Halo sum: every device sends")
    assert "$" not in program.read_text() + test.read_text()
    run = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path / 'mine')!r}); import halo_sum; halo_sum.main(); "
        "import test_halo_sum as t; [t.test_each_device_adds_what_its_left_neighbour_has(n, s) "
        "for n, s in ((1, None), (3, 2))]"
    )
    done = run_words([sys.executable, "-c", run], TILESCALE_EMULATE="1")
    assert done.code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("device ") and "right" in line] == [
        f"device {device}: right" for device in range(4)
    ]


def test_nothing_is_replaced(tmp_path: Path):
    (tmp_path / "test_mine.py").write_text("mine")
    made = new("mine", "--folder", tmp_path)
    assert made.exit_code == 1 and "test_mine.py already exists; no file was written" in made.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


@pytest.mark.parametrize("name", ["my-program", "class", "test_it", "a/b", "1"])
def test_names_are_those_of_modules(name: str, tmp_path: Path):
    made = new(name, "--folder", tmp_path)
    assert made.exit_code == 2 and "is no name of a Python module" in made.output and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    made = new("mine", "--folder", tmp_path / "file" / "below")
    assert made.exit_code == 1 and "cannot be written" in made.output
