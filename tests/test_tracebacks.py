# SPDX-License-Identifier: MIT
"""Output of an uncaught error: the message first, then the lines of the user's files."""

import io
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import tracebacks
from tilescale.errors import UnknownMachineError, UsageError
from tilescale.settings import settings

ROOT = Path(__file__).parents[1]


def caught(machine: str = "h200") -> UnknownMachineError:
    try:
        tilescale.Machine.load(machine)
    except UnknownMachineError as error:
        return error
    raise AssertionError


def shown(error: BaseException) -> str:
    output = io.StringIO()
    with redirect_stderr(output):
        tracebacks.show(type(error), error, error.__traceback__)
    return output.getvalue()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_TRACEBACK", "full")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def test_the_message_is_first_and_only_own_lines_follow():
    error = caught()
    head, *rest = shown(error).splitlines()
    assert head.startswith(f"UnknownMachineError: {error.message}")
    calls = rest[next(i for i, line in enumerate(rest) if "called from" in line) + 1 :]
    line = caught.__code__.co_firstlineno + 2
    assert calls == [f"        {__file__}:{line} in caught: tilescale.Machine.load(machine)"]
    assert "\x1b" not in shown(error), "no colour where there is no terminal"


def test_causes_and_notes_are_said():
    error = UsageError("first", hint="second")
    error.__cause__ = ValueError("third")
    error.__notes__ = ["fourth"]
    head, *rest = shown(error).splitlines()
    assert head == "UsageError: first" and rest == ["    hint: second", "    fourth", "    caused by ValueError: third"]


def test_all_frames_on_request(full: None):
    text = shown(caught())
    assert text.startswith("Traceback (most recent call last):") and "tilescale/hda/load.py" in text


def test_errors_of_others_are_printed_as_ever():
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        assert shown(error).startswith("Traceback (most recent call last):")


def test_a_setting_that_is_wrong_can_be_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_TRACEBACK", "all")
    settings.cache_clear()
    try:
        with pytest.raises(UsageError) as wrong:
            settings()
        assert shown(wrong.value).startswith("UsageError: TILESCALE_TRACEBACK='all' is not understood")
    finally:
        settings.cache_clear()


def test_notebooks_get_colours():
    lines = caught()._render_traceback_()
    assert lines[0].startswith("\x1b[1;31mUnknownMachineError: \x1b[0m")
    assert any("called from" in line for line in lines)


@pytest.mark.parametrize("hook", ["sys", "tvm", "ipykernel"])
def test_hooks_of_others_stay(hook: str, monkeypatch: pytest.MonkeyPatch):
    theirs = lambda *_: None  # noqa: E731
    theirs.__module__ = hook
    monkeypatch.setattr(sys, "excepthook", theirs)
    UsageError("made")
    assert (sys.excepthook is tracebacks.show) == (hook != "ipykernel")


def test_a_script_that_fails(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import tilescale\n\ndef mine():\n    tilescale.Machine.load('h200')\n\nmine()\n")
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("UnknownMachineError: ")
    calls = ["6 in <module>: mine()", "4 in mine: tilescale.Machine.load('h200')"]
    assert done.stderr.splitlines()[-2:] == [f"        {script}:{call}" for call in calls]


def plus(t):
    t = t * 2  # noqa: F841 - the mistake


def negative(t):
    t = -t  # noqa: F841


def product(t):
    t = t @ t  # noqa: F841


def updated(t):
    t += 1


def by_torch(t):
    t = torch.relu(t)  # noqa: F841


def function_of_a_tile(t):
    T.copy(T.exp(t), t)


def method(t):
    t.copy_(t)


def unknown(t):
    T.copi(t, t)


def undefined(t):
    T.copy(t, nowhere)  # noqa: F821


def many(t):
    T.clear(t, 1, 2, 3)


HABITS = [
    (plus, UsageError, "T.Parallel"), (negative, UsageError, "T.Parallel"), (product, UsageError, "T.gemm"),
    (updated, UsageError, "T.Parallel"), (by_torch, UsageError, "T.Parallel"),
    (function_of_a_tile, UsageError, "T.Parallel"), (method, UsageError, "in place of methods"),
    (unknown, AttributeError, "did you mean 'copy'"), (undefined, NameError, "nowhere"), (many, UsageError, "T.clear"),
]  # fmt: skip


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
@pytest.mark.parametrize(("body", "kind", "said"), HABITS, ids=lambda value: getattr(value, "__name__", None))
def test_mistakes_in_a_traced_function_show_own_lines_alone(body, kind, said):  # noqa: ANN001
    statement = T.macro(body)
    with pytest.raises(kind) as found:

        @T.prim_func
        def program(X: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                statement(X)

    text = shown(found.value)
    assert said in text and "site-packages" not in text and "Traceback" not in text
    place = f"{__file__}:{body.__code__.co_firstlineno + 1}"
    assert f"\n    at {place}\n" in text or text.splitlines()[-1].startswith(f"        {place} in {body.__name__}")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_two_names_for_one_extent():
    with pytest.raises(UsageError, match="unpack") as found:

        @T.prim_func
        def program(X: T.Tensor((8,), "float32")):
            with T.Kernel(device=1, block=8, threads=32) as (bx, by):
                T.clear(X)

    assert "T.Kernel(gx) as bx" in shown(found.value)


def test_a_traced_function_that_is_called():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            T.clear(X)

    with pytest.raises(TypeError) as found:
        program(torch.zeros(8))
    text = shown(found.value)
    assert "tilescale.emulate(program, tensors)" in text and "program(torch.zeros(8))" in text


def test_the_language_by_its_short_name():
    from tilescale import T as short  # noqa: N811

    assert short is T
