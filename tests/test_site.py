# SPDX-License-Identifier: MIT
"""The documentation site builds without a warning, has every public name, no dead link, and no remote resources."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests import warm
from tests.public_names import public_names
from tests.shared import made_once

ROOT = Path(__file__).parents[1]
for package in ("sphinx", "myst_parser", "furo", "sphinx_design", "sphinx_copybutton"):
    pytest.importorskip(package, reason="the extra `docs` is not installed")


@pytest.fixture(scope="module")
def site() -> Path:
    """The site of `make docs`, without the examples' outputs, which other tests check, and in a plain theme: sidebars
    with all pages take a third of the time of a build.
    """
    return made_once("site", lambda folder: build(folder, "-D", "html_theme=basic"))


def build(folder: Path, *options: str) -> None:
    words = ["--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", str(folder / ".trees")]
    words += ["-D", "run_examples=0", "-D", "toc_object_entries=0", *options]
    command = [warm.python(), "-m", "sphinx", *words, "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


class Page(HTMLParser):
    """The anchors of a page, where it links to, and what a browser loads with it."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchor, the link or the loaded file of a tag."""
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif target := given.get("src") or (given.get("href") if tag == "link" else None):
            self.loads.append(target)


@cache
def parsed(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def pages(site: Path) -> Iterator[tuple[str, Page]]:
    for path in sorted(site.rglob("*.html")):
        yield path.relative_to(site).as_posix(), parsed(path)


def is_remote(target: str) -> bool:
    return target.startswith(("http:", "https:", "//", "mailto:"))


@pytest.mark.nightly
def test_the_site_is_built_in_its_own_theme(tmp_path: Path):
    build(tmp_path)
    assert "sidebar-drawer" in (tmp_path / "index.html").read_text(encoding="utf-8")
    every_page_is_built(tmp_path)


@pytest.mark.slow
def test_every_page_is_built(site: Path):
    every_page_is_built(site)


def every_page_is_built(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    sources += [Path("examples", program.name) for program in (ROOT / "examples/distributed").glob("[0-9]*.py")]
    assert not {path.with_suffix(".html").as_posix() for path in sources} - built


def test_the_reference_has_every_public_name(site: Path):
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    found = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    assert not sorted(public_names().keys() - found), "add them to a page of docs/reference"


def test_no_link_is_dead_and_nothing_is_loaded_from_afar(site: Path):
    dead, loaded = [], []
    for name, page in pages(site):
        loaded += [f"{name}: {load}" for load in page.loads if is_remote(load)]
        for link in [*page.links, *page.loads]:
            if is_remote(link) or link.startswith("data:"):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (site / name).parent / path.partition("?")[0] if path else site / name
            if not target.exists() or (anchor and target.suffix == ".html" and anchor not in parsed(target).anchors):
                dead.append(f"{name}: {link}")
    assert not dead and not loaded


def test_names_in_prose_are_links_to_the_reference(site: Path):
    links = parsed(site / "programming-model.html").links
    assert "reference/language.html#T.copy" in links and "machines.html" in links


def test_the_gallery_shows_every_example(site: Path):
    links = parsed(site / "examples.html").links
    names = [program.stem for program in (ROOT / "examples/distributed").glob("[0-9]*.py")]
    assert not [name for name in names if f"examples/{name}.html" not in links]
    shown = (site / "examples.html").read_text(encoding="utf-8")
    assert shown.count('class="figure"') == len(names), "the figure of a card is part of the page"
    algorithms = shown.partition('<section id="algorithms">')[2].partition("</section>")[0]
    assert set(re.findall(r"examples/(\d\d)_", algorithms)) == {"16", "17", "21"}
    models = [program.stem for program in (ROOT / "examples/models").glob("*.py")]
    assert models and not [name for name in models if f"examples/{name}.html" not in links]
    cards = shown.partition('<section id="models">')[2].partition("</section>")[0]
    assert cards.index("Expert parallelism: a layer of experts") < cards.index("the device knows where tokens go")


def test_a_program_whose_output_names_its_lines_has_line_numbers(site: Path):
    page = (site / "first-program.html").read_text(encoding="utf-8")
    before, _, output = page.partition("deadlock: 4 units wait")
    assert "program.py:10" in output
    assert before.rpartition('"highlight-python')[2].count('class="linenos"') > 9


def test_an_example_is_run_for_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "extensions")
    from example_runs import run

    printed = run(ROOT / "examples" / "distributed" / "01_neighbour_shift.py", tmp_path / "01-run.svg")
    assert "neighbour shift, device 0, 1, 2, 3: largest error 0.0e+00" in printed
    drawn = (tmp_path / "01-run.svg").read_text(encoding="utf-8")
    assert "<path" in drawn and "prefers-color-scheme: dark" in drawn
