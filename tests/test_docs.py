# SPDX-License-Identifier: MIT
"""The pages are correct: their code runs and prints the shown output, the names exist, lists are complete.

`UPDATE_DOCS=1 pytest tests/test_docs.py` writes printed output and the list of errors into the pages.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import inspect
import io
import json
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

import tilescale
import tilescale.comm.local_job
import tilescale.language
from tests.comm.conftest import run_words
from tests.public_names import documented, public_names
from tilelang_core import TESTED
from tilescale.backends.emulator.checks import CHECKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = DOCS / "examples"  # written when the site is built
SITE_PAGES = sorted(page for page in DOCS.rglob("*.md") if MADE not in page.parents)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE_PAGES]
CODE = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n\n?)?```(?P<language>python|yaml|console)\n(?!>>>)(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMED_BLOCK = r"<!-- file: (\S+) -->"
PACKAGES = ("tilescale", "tilelang_core")
SHORT = (
    "architecture", "collectives", "how-fast", "language-operations", "memory-model", "operators", "overlap",
    "predictions", "programming-model",
)  # fmt: skip
MOST_RAISERS = 12
"""Names in a row of the errors' page; the reference has each name with its errors."""

MOST_WORDS = 1500
"""Pages of what a user needs, and the limit of their words, code and tables included."""

pytestmark = pytest.mark.usefixtures("remedies")


def short(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=short)


def write_or_compare(page: Path, wanted: str) -> None:
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(wanted, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == wanted, "if this is meant: UPDATE_DOCS=1 pytest tests/test_docs.py"


def compare_picture(shown: Path, drawn: Path) -> None:
    if "matplotlib" not in drawn.read_text(encoding="utf-8")[:2000]:
        write_or_compare(shown, drawn.read_text(encoding="utf-8"))
    elif os.environ.get("UPDATE_DOCS"):
        shown.write_bytes(drawn.read_bytes())
    assert shown.exists() and drawn.stat().st_size > 0


# -- code --------------------------------------------------------------------------------------------------------------


def run(code: str, file: Path, names: dict[str, object]) -> str:
    """Run a block of a page, in a file of its own, as kernels are traced from their source; returns what it prints."""
    file.parent.mkdir()
    file.write_text(code, encoding="utf-8")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(file), "exec", dont_inherit=True), names)
    return output.getvalue().replace(f"{file.parent}/", "").replace(f"{Path.cwd()}/", "")


def type_in(commands: str) -> str:
    """Run the lines that begin with `$`; returns what they print."""
    lines = [line.removeprefix("$ ").partition("  #")[0] for line in commands.splitlines()]
    command_line = [sys.executable, "-c", "from tilescale.cli import main; main(prog_name='tilescale')"]
    programs = {"python": [sys.executable], "tilescale": command_line}
    output = ""
    for name, *words in map(shlex.split, lines):
        done = run_words([*programs[name], *words], COLUMNS="110", TILESCALE_EMULATE="1")
        assert done.code == 0, done.output
        output += "".join(f"{line.rstrip()}\n" for line in done.output.splitlines())
    return output.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.nightly] * (page.parent.name in ("notes", "upstream")))
        for page in PAGES
        if CODE.search(page.read_text())
    ],
    ids=short,
)
def test_code_prints_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks run in the page's order, in a folder of the page; one after `<!-- file: NAME -->` is that file instead.

    The page shows their pictures: `images/NAME` is the file NAME that they wrote. Pictures by matplotlib differ between
    its versions and are not compared: the report next to them has the numbers.
    """
    monkeypatch.chdir(tmp_path)
    text, names = page.read_text(encoding="utf-8"), {"__name__": page.stem}
    if "\nimport transformers\n" in text:
        pytest.importorskip("transformers")

    def with_output(match: re.Match[str]) -> str:
        line, code, printed = text.count("\n", 0, match.start()) + 1, match["code"], ""
        if match["file"]:
            Path(match["file"]).write_text(code, encoding="utf-8")
        elif match["language"] == "python":
            printed = run(code, tmp_path / f"{page.stem}_line_{line}" / "program.py", names)
        elif match["language"] == "console":
            printed = type_in(code)
        if match["output"] is None:
            return match[0]
        printed = re.sub(rf"{page.stem}_line_\d+/", "", printed)
        begin, end = (place - match.start() for place in match.span("output"))
        return f"{match[0][:begin]}{printed.rstrip()}\n{match[0][end:]}"

    write_or_compare(page, CODE.sub(with_output, text))
    for name in re.findall(r"\]\(images/(\S+)\)", text):
        compare_picture(page.parent / "images" / name, Path(name))


# -- names -------------------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> list[str]:
    """Backquoted text of the page's prose."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def is_path(text: str) -> bool:
    a_file = text.endswith((".py", ".md", ".toml", ".txt"))
    return bool(re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", text)) and ("/" in text or a_file)


@cache
def words() -> set[str]:
    """Every word of the project's own source."""
    files = [ROOT / "pyproject.toml", ROOT / "Makefile"]
    for top in (*PACKAGES, "tests"):
        files += [*(ROOT / top).rglob("*.py"), *(ROOT / top).rglob("*.yaml")]
    return {word for path in files for word in re.findall(r"[\w-]+|\w+", path.read_text(encoding="utf-8"))}


@every_page
def test_dotted_names_exist(page: Path):
    for text in quoted(page):
        name = re.match(r"(?:T|tilescale|tilelang_core)(?:\.\w+)+", text)
        if name is None:
            continue
        top, *rest = name[0].split(".")
        value = tilescale.language if top == "T" else importlib.import_module(top)
        for part in rest:
            if inspect.ismodule(value) and not hasattr(value, part):
                value = importlib.import_module(f"{value.__name__}.{part}")
            else:
                value = getattr(value, part)


@every_page
def test_paths_and_links_exist(page: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page))
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = {text for text in quoted(page) if is_path(text)} - readers_files(page)
    missing += [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


def readers_files(page: Path) -> set[str]:
    """Files that a page has the reader write: "save it as `first.py`", or the name of a block."""
    text = page.read_text(encoding="utf-8")
    return {*re.findall(r"\bas\s+`([\w-]+\.\w+)`", text), *re.findall(NAMED_BLOCK, text)}


@every_page
def test_a_block_that_is_a_file_has_its_name_in_the_prose(page: Path):
    unnamed = [name for name in re.findall(NAMED_BLOCK, page.read_text(encoding="utf-8")) if name not in quoted(page)]
    assert not unnamed, "the mark is a comment, which no reader sees: name the file in the sentence before"


def test_architecture_names_exist_and_cover_the_source():
    page = ROOT / "docs" / "architecture.md"
    text = set(quoted(page))
    identifiers = {name for item in text for name in re.findall(r"^[A-Za-z_][\w-]*(?=$|\()", item)}
    assert not identifiers - words()
    folders = {item.rstrip("/") for item in text if is_path(item)}
    files = [path.relative_to(ROOT) for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    uncovered = [path for path in files if not folders & {path.as_posix(), path.parent.as_posix()}]
    assert not uncovered


def test_every_page_is_named_once_in_the_contents():
    """In a toctree of `docs/index.md`, or of the page above it."""
    trees = [tree for page in SITE_PAGES for tree in TOCTREE.findall(page.read_text())]
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in SITE_PAGES]
    listed = [name for tree in trees for line in tree.splitlines() for name in fnmatch.filter(names, line)]
    assert sorted([*listed, "index"]) == sorted(names)


@pytest.mark.parametrize("name", SHORT)
def test_a_page_for_users_is_short(name: str):
    words = len((DOCS / f"{name}.md").read_text(encoding="utf-8").split())
    assert words <= MOST_WORDS, "lab notes and long tables have pages of their own in docs/notes"


def test_the_reference_lists_what_is_public():
    """`tests/test_site.py` looks for every name on the site; this asks the pages, which takes no build."""
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"[\w.]+", text))
    public = public_names()
    members = {name for name in public if isinstance(public.get(name.rpartition(".")[0]), type)}
    missing = public.keys() - members - listed
    assert not [name for name in missing if not name.startswith("tilescale.errors.")]  # the page takes the module


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make (\w+)", page.read_text())) <= targets


def test_the_language_page_shows_all_that_is_added():
    shown = "".join((DOCS / f"{page}.md").read_text() for page in ("programming-model", "language-operations"))
    assert not [name for name in tilescale.language.ADDED if f"T.{name}" not in shown and name != "Distribution"]


def test_the_page_of_bugs_shows_every_check():
    shown = (DOCS / "bugs.md").read_text(encoding="utf-8")
    assert not [name for name in CHECKS if f"| `{name}` |" not in shown]


def test_the_page_of_bugs_begins_with_an_index():
    shown = (DOCS / "bugs.md").read_text(encoding="utf-8")
    indexed = re.findall(r"^\| \[(.+?)\]\(#", shown, re.MULTILINE)
    assert indexed == [heading for heading in re.findall(r"^## (.+)", shown, re.MULTILINE) if heading != "Checks"]


def test_the_error_in_the_readme_is_that_of_its_program(tmp_path: Path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = "".join(line for line in CODE.search(text)["code"].splitlines(True) if "T.wait" not in line)
    shown = re.search(r"```text\nRaceError: (.*?)```", text, re.DOTALL)[1].splitlines()
    with pytest.raises(tilescale.errors.RaceError) as caught:
        run(program, tmp_path / "readme" / "program.py", {"__name__": "readme"})
    said = str(caught.value).replace(f"{tmp_path}/readme/", "").splitlines()
    assert [line for line in shown if line not in said] == []


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_times_of_models_are_those_that_were_measured():
    text = (ROOT / "docs" / "in-a-model.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["rows"]:
        unit, digits, scale = ("us", 0, 1) if row["mode"] == "graph" else ("ms", 1, 1e3)
        time, low, high = (f"{us / scale:.{digits}f}" for us in (row["us"], *row["spread"]))
        is_shown = f"{time} {unit} ({low} to {high})" in text
        assert is_shown or row["contender"] == "tilescale, gathered kept", row["work"]


def test_the_tested_range_of_tilelang_is_one():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"tilelang>={TESTED[0]},<{TESTED[1]}"' in project


def test_a_release_has_one_version_and_notes():
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", notes, re.MULTILINE)
    assert headings[0] == "[Unreleased]" and all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", h) for h in headings[1:]
    )
    assert len(set(headings)) == len(headings)
    version, date = headings[1][1:].split("] - ")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version == tilescale.__version__ and f"\nversion: {version}\ndate-released: {date}\n" in cited
    kinds = set(re.findall(r"^### (.*)$", notes, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# -- errors ------------------------------------------------------------------------------------------------------------

MARK = "<!-- what follows is written by tests/test_docs.py -->\n"


def error_tables() -> str:
    """All error classes by the sections of tilescale/errors.py: their meanings, and the functions that raise them."""
    source = inspect.getsource(tilescale.errors)
    parts = re.split(r"^# -- (.*?) -+$", source, flags=re.MULTILINE)[1:]
    tables = [_table(title, body) for title, body in zip(parts[::2], parts[1::2], strict=True)]
    return "".join(tables)


def _table(title: str, body: str) -> str:
    rows = [f"\n## {title[0].upper()}{title[1:]}\n", "| error | meaning | raised by |", "|---|---|---|"]
    for name in re.findall(r"^class (\w+)", body, re.MULTILINE):
        meaning = " ".join(inspect.getdoc(getattr(tilescale.errors, name)).split())
        who = [f"`{raiser}`" for raiser in raisers(name)]
        named = ", ".join(
            who if len(who) <= MOST_RAISERS else [*who[: MOST_RAISERS - 1], f"and {len(who) - MOST_RAISERS + 1} more"]
        )
        rows.append(f"| `{name}` | {meaning} | {named} |")
    return "\n".join(rows) + "\n"


def raisers(error: str) -> list[str]:
    """Public names whose docstrings say that they raise an error; `tilescale run` prints one instead."""
    found = ["tilescale run"] if f"{error}(" in inspect.getsource(tilescale.comm.local_job) else []
    for name, value in public_names().items():
        text = inspect.getdoc(documented(value)) or ""
        if not name.startswith("tilescale.errors.") and re.search(rf"\b{error}\b", text):
            found.append(name)
    return sorted(found, key=str.lower)


def test_errors_page_lists_all():
    page = ROOT / "docs" / "errors.md"
    prose, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    assert mark
    write_or_compare(page, prose + MARK + error_tables())
    classes = [name for name in tilescale.errors.__all__ if name not in {"Location", "TileScaleError"}]
    assert not [name for name in classes if f"| `{name}` |" not in page.read_text()]


@pytest.mark.parametrize("name", [n for n in tilescale.errors.__all__ if n not in {"Location", "TileScaleError"}])
def test_every_error_is_announced_by_somebody(name: str):
    assert raisers(name)
