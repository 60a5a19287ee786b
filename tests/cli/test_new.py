# SPDX-License-Identifier: MIT
"""`tilescale new`: its output runs, is right, and replaces no file."""

import ast
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.comm.conftest import command, run_words
from tilescale.cli import main, tutorial
from tilescale.errors import UninitializedReadError


def new(*words: object) -> Result:
    return CliRunner().invoke(main, ["new", *map(str, words)])


def test_the_program_and_its_test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    made = new("halo_sum", "--folder", tmp_path / "mine")
    assert made.exit_code == 0 and "halo_sum.py && python -m pytest" in made.output
    program, test = tmp_path / "mine/halo_sum.py", tmp_path / "mine/test_halo_sum.py"
    assert sorted(tmp_path.joinpath("mine").iterdir()) == [program, tmp_path / "mine/pytest.ini", test]
    assert ast.get_docstring(ast.parse(program.read_text())).startswith("Halo sum: every device sends")
    assert "$" not in program.read_text() + test.read_text()
    runpy.run_path(str(program), run_name="__main__")
    assert right(capsys.readouterr().out) == {f"device {device}: right" for device in range(4)}
    monkeypatch.syspath_prepend(program.parent)
    own = runpy.run_path(str(test))["test_each_device_adds_what_its_left_neighbour_has"]
    for devices, seed in ((1, None), (3, 2)):
        own(devices, seed)
    done = run_words([*command("tilescale run", 2), str(program)], TILESCALE_EMULATE="1")
    assert done.code == 0, done.output
    assert right(done.output) == {f"[{device}] device {device}: right" for device in range(2)}


def test_settings_of_tests_around_the_folder_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new program in a clone of this repository, whose tests are imported in another way."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    monkeypatch.chdir(tmp_path)
    new("halo")
    words = [sys.executable, "-m", "pytest", "-q", "-k", "None-1", "-p", "no:cacheprovider", "halo"]
    done = run_words(words)
    assert done.code == 0, done.output


def right(output: str) -> set[str]:
    """The lines of devices whose result is right."""
    return {line for line in output.splitlines() if "device " in line and line.endswith("right")}


def test_nothing_is_replaced(tmp_path: Path):
    (tmp_path / "test_mine.py").write_text("mine")
    made = new("mine", "--folder", tmp_path)
    assert made.exit_code == 1 and "test_mine.py already exists; no file was written" in made.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


@pytest.mark.parametrize("name", ["my-program", "class", "test_it", "a/b", "1"])
def test_names_are_those_of_modules(name: str, tmp_path: Path):
    made = new(name, "--folder", tmp_path)
    assert made.exit_code == 2 and "is not a name of a Python module" in made.output and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    made = new("mine", "--folder", tmp_path / "file" / "below")
    assert made.exit_code == 1 and "cannot be written" in made.output


def test_pytest_is_installed_first_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["tilescale.cli.new"], "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    made = new("halo")
    assert "python halo.py && python -m pip install pytest && python -m pytest" in made.output


def test_the_tutorial_breaks_the_program_and_ends_with_a_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedies: None
):
    """In this process; the step that starts a job is what the first test does."""
    executed = []

    def execute(words: list[str], folder: Path) -> int:
        executed.append(" ".join(words))
        try:
            runpy.run_path(str(folder / words[-1]), run_name="__main__") if len(words) == 1 else None
        except UninitializedReadError as error:
            print(error)
            return 1
        return 0

    monkeypatch.setattr(tutorial, "execute", execute)
    monkeypatch.chdir(tmp_path)
    made = new("--tutorial")
    assert made.exit_code == 0, made.output
    assert executed == ["halo.py"] * 3 + ["-m tilescale.cli run -n 2 halo.py"]
    line = 1 + Path("halo/halo.py").read_text().splitlines().index(tutorial.WAIT.rstrip())
    assert f'add T.wait(arrived[row], ">=", 1) before line {line}' in made.output
    assert "mine[0, j] = mine[0, j] - theirs[0, j]" in Path("halo/halo.py").read_text()
    assert "tensors[device] - tensors[device - 1]" in Path("halo/test_halo.py").read_text()


def test_a_step_that_does_not_end_as_it_should_ends_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tutorial, "execute", lambda words, folder: 1)
    made = new("--tutorial", "--folder", tmp_path / "mine")
    assert made.exit_code == 1 and "`python halo.py` should have succeeded" in made.output
