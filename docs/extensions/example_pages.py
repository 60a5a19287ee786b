# SPDX-License-Identifier: MIT
"""A page for every program of `examples/distributed`, under `docs/examples`: what its docstring says, then its code.

The table of these programs is that of their README; it takes the place of a mark on the page `docs/examples.md`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "distributed"
MARK = "<!-- the table of examples/distributed/README.md -->"


def page(program: Path) -> str:
    """The page of one program."""
    tree = ast.parse(program.read_text(encoding="utf-8"))
    title, _, rest = ast.get_docstring(tree).partition("\n")
    name, _, what = title.rstrip(".").partition(": ")
    begin = tree.body[1].lineno
    return (
        f"# {program.stem[:2]} {name}\n\n{what[:1].upper()}{what[1:]}.\n{rest}\n\n"
        f"## The program\n\n`examples/distributed/{program.name}`:\n\n"
        f"```{{literalinclude}} ../../examples/distributed/{program.name}\n:lines: {begin}-\n:language: python\n```\n"
    )


def write_pages(app: Sphinx) -> None:
    """Write those that changed, and remove those whose program is gone."""
    folder = Path(app.srcdir) / "examples"
    folder.mkdir(exist_ok=True)
    pages = {f"{program.stem}.md": page(program) for program in PROGRAMS.glob("[0-9]*.py")}
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        target = folder / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def with_table(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the table in, with links to the pages instead of the programs."""
    if MARK in source[0]:
        readme = (PROGRAMS / "README.md").read_text(encoding="utf-8")
        table = "\n".join(line for line in readme.splitlines() if line.startswith("|"))
        source[0] = source[0].replace(MARK, re.sub(r"\((\d\d_\w+)\.py\)", r"(examples/\1.md)", table))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", with_table)
    return {"parallel_read_safe": True}
