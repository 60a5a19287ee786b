# SPDX-License-Identifier: MIT
"""A page for every program of `examples/distributed` and `examples/models`, under `docs/examples`, and their galleries.

A page has the figure of the idea, the text of the program's docstring, its code, its output, its timeline, and things
to try. The galleries replace marks on the page `docs/examples.md`; headings and words of their cards are those of the
README of the programs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from example_runs import run_examples
from sphinx.application import Sphinx
from sphinx.util.display import status_iterator

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "distributed"
MARK = "<!-- the gallery of examples/distributed -->"
ROW = re.compile(
    r"^\| \[(?P<stem>(?P<number>\d\d)_\w+)\.py\]\(.*?\) \| (?P<pattern>.*?) \| (?P<idea>.*?) \| (?P<levels>.*?) \|$",
    re.MULTILINE,
)
MODELS = ROOT / "examples" / "models"
MODELS_MARK = "<!-- the gallery of examples/models -->"
MODELS_ROW = re.compile(r"^\| \[(?P<stem>\w+)\.py\]\(.*?\) \| (?P<pattern>.*?) \| (?P<idea>.*?) \|$", re.MULTILINE)
MODELS_CARD = """:::{{grid-item-card}} {name}
:link: examples/{stem}
:link-type: doc

{pattern}

*{idea}*
:::
"""
CARD = """:::{{grid-item-card}} {number} {name}
:link: examples/{stem}
:link-type: doc
:img-top: diagrams/example-{number}.svg

{pattern}

*{idea}*
:::
"""


def docstring(program: Path) -> tuple[str, str, str, str]:
    """Title, introduction, idea, and what to try, as a program's docstring says."""
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    title, _, rest = text.partition("\n")
    rest, _, tries = rest.partition("\nThings to try: ")
    about, _, idea = rest.partition("\nThe idea: ")
    return title.rstrip("."), about.strip("\n"), idea, tries


def code(program: Path) -> str:
    """The block that shows a file below its docstring."""
    begin = ast.parse(program.read_text(encoding="utf-8")).body[1].lineno
    file = f"../../{program.relative_to(ROOT)}"
    return f"```{{literalinclude}} {file}\n:lines: {begin}-\n:lineno-match:\n:language: python\n```"


def points(tries: str) -> str:
    """What to try, as a list."""
    parts = re.split(r";\s+", " ".join(tries.split()).rstrip("."))
    return "\n".join(f"- {part[:1].upper()}{part[1:]}." for part in parts)


def page(program: Path, folder: Path) -> str:
    """The page of one program; `folder` has what it printed and drew, if it has been run."""
    number = program.stem[:2]
    title, about, idea, tries = docstring(program)
    name, _, what = title.partition(": ")
    parts = [
        f"# {number} {name}",
        f"{what[:1].upper()}{what[1:]}.",
        f"![{title}](../diagrams/example-{number}.svg)",
        about,
        f"## The idea\n\n{idea[:1].upper()}{idea[1:]}",
        f"## The program\n\n`examples/distributed/{program.name}`; what it imports is [shown here](common.md).",
        code(program),
    ]
    if (folder / f"{number}.txt").exists():
        command = f"```console\n$ python examples/distributed/{program.name} --timeline run.svg\n```"
        parts += ["## What it prints", command, f"```{{literalinclude}} {number}.txt\n:language: text\n```"]
        parts += ["## When it happens"]
        parts += [f"![timeline of {name}]({drawn.name})" for drawn in timelines(folder, number)]
    return "\n\n".join([*parts, "## Things to try", points(tries)]) + "\n"


def timelines(folder: Path, number: str) -> list[Path]:
    """Timelines of an example in the order of its runs: `06-run.svg`, `06-run-2.svg`, ..."""
    return sorted(folder.glob(f"{number}-run*.svg"), key=lambda drawn: (len(drawn.stem), drawn.stem))


def model_page(program: Path) -> str:
    """The page of a program of `examples/models`."""
    title, about, idea, tries = docstring(program)
    name, _, what = title.partition(": ")
    command = f"```console\n$ tilescale run -n 2 examples/models/{program.name}\n```"
    parts = [f"# {name}", f"{what[:1].upper()}{what[1:]}.", about, f"## The idea\n\n{idea[:1].upper()}{idea[1:]}"]
    return "\n\n".join([*parts, "## The program", command, code(program), "## Things to try", points(tries)]) + "\n"


def shared_page() -> str:
    """The page of the files that programs import."""
    parts = ["# What the examples share"]
    for name in "common.py", "forms.py", "attention.py":
        program = PROGRAMS / name
        text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
        parts += [f"## {name}", text, code(program)]
    return "\n\n".join(parts) + "\n"


def write_pages(app: Sphinx) -> None:
    """Write those that changed, and remove those whose program is gone."""
    folder = Path(app.srcdir) / "examples"
    folder.mkdir(exist_ok=True)
    programs = sorted(PROGRAMS.glob("[0-9]*.py"))
    if app.config.run_examples:
        for _ in status_iterator(run_examples(programs, folder), "running examples... ", length=len(programs)):
            pass
    pages = {f"{program.stem}.md": page(program, folder) for program in programs}
    pages |= {f"{program.stem}.md": model_page(program) for program in sorted(MODELS.glob("*.py"))}
    pages["common.md"] = shared_page()
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        target = folder / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def cards(readme: str) -> str:
    """The gallery: below each heading a card for each row of its table."""
    sections = [section.split("\n", 1) for section in readme.split("\n## ")[1:]]
    found = {heading: [_card(row) for row in ROW.finditer(body)] for heading, body in sections}
    return "\n\n".join(f"## {heading}\n\n{grid(made)}" for heading, made in found.items() if made)


def _card(row: re.Match[str]) -> str:
    return CARD.format(name=docstring(PROGRAMS / f"{row['stem']}.py")[0].partition(": ")[0], **row.groupdict())


def model_cards(readme: str) -> str:
    """The gallery of models: a card for each row of the table."""
    rows = [match.groupdict() for match in MODELS_ROW.finditer(readme)]
    names = [docstring(MODELS / f"{row['stem']}.py")[0].partition(": ")[0] for row in rows]
    return grid([MODELS_CARD.format(name=name, **row) for name, row in zip(names, rows, strict=True)])


def grid(made: list[str]) -> str:
    """Cards side by side."""
    body = "\n".join(made)
    return f"::::{{grid}} 1 1 2 2\n:gutter: 3\n:class-container: gallery\n\n{body}\n::::"


def with_gallery(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the galleries in."""
    for mark, folder, made in ((MARK, PROGRAMS, cards), (MODELS_MARK, MODELS, model_cards)):
        if mark in source[0]:
            source[0] = source[0].replace(mark, made((folder / "README.md").read_text(encoding="utf-8")))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("run_examples", True, "env", bool)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", with_gallery)
    return {"parallel_read_safe": True}
