# SPDX-License-Identifier: MIT
"""The notebook of the examples runs from its first cell to its last, in IPython, and its outputs are as described."""

import json
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tilescale.errors import RaceError

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_look.ipynb"


@pytest.fixture(scope="module")
def shown() -> dict[str, dict]:
    """Output of each cell: its source -> its text, and its displays by kind."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shell, found = InteractiveShell(), {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None, "outputs are not kept in the repository"
        source = "".join(cell["source"])
        with capture_output() as captured:
            result = shell.run_cell(source, store_history=True)
        expected = "raises-exception" in cell["metadata"].get("tags", ())
        assert isinstance(result.error_in_exec, RaceError) == expected, captured.stderr
        assert result.error_before_exec is None and (expected or result.error_in_exec is None), captured.stdout
        data = shell.display_formatter.format(result.result)[0] if result.result is not None else {}
        found[source] = {"said": captured.stdout, **data}
    return found


def of(shown: dict[str, dict], words: str) -> dict:
    return next(what for source, what in shown.items() if words in source)


def test_a_machine_is_drawn(shown: dict):
    assert of(shown, "Machine.load")["text/html"].startswith("<svg")


def test_a_race_is_told_in_short(shown: dict):
    said = of(shown, "emulate(too_early")["said"]
    assert said.startswith("\x1b[1;31mRaceError: ") and "Y[" in said.splitlines()[0]
    assert "called from" in said and "tilescale/backends" not in said and len(said.splitlines()) < 20


def test_the_report_and_its_timeline_are_shown(shown: dict):
    report = of(shown, "arguments = tensors()")
    assert "<b>double_the_neighbour</b> on h200-sxm-8" in report["text/html"] and len(report["text/plain"]) < 100
    timeline = of(shown, "report.plot()")
    assert timeline["text/html"].startswith("<iframe") and len(timeline["text/plain"]) < 150


def test_the_schedule_of_a_kernel_has_lines(shown: dict):
    kernel = of(shown, "tilescale.compile")
    assert kernel["text/html"].count("\n") >= 3 and "double_the_neighbour" in kernel["text/plain"]


def test_texts_with_columns_name_their_font(shown: dict):
    """The pages of nbconvert have no font for `pre`."""
    texts = [html for cell in shown.values() if "<pre" in (html := cell.get("text/html", "")) and "<iframe" not in html]
    assert len(texts) == 2 and all("<pre style='font-family:monospace'>" in html for html in texts)


def test_other_machines_take_other_times(shown: dict):
    times = [line.partition(": ")[2] for line in of(shown, "b200")["said"].splitlines()]
    assert len(times) == 3 and len(set(times)) > 1
