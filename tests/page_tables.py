# SPDX-License-Identifier: MIT
"""Generated tables and lists of a page: each follows a comment with its name."""

import os
import re
from collections.abc import Mapping
from pathlib import Path


def with_tables(text: str, made: Mapping[str, str]) -> str:
    """A page with what is made in place of what it has, by name."""
    for name, table in made.items():
        pattern = rf"<!-- {name} -->\n+([|-] ?[^\n]*\n)*\n*"
        text, count = re.subn(pattern, lambda _, n=name, t=table: f"<!-- {n} -->\n\n{t}\n\n", text)
        assert count == 1, name
    return text.rstrip() + "\n"


def compare_tables(page: Path, made: Mapping[str, str]) -> None:
    """A page has what is made; `UPDATE_DOCS=1` writes it."""
    wanted = with_tables(page.read_text(encoding="utf-8"), made)
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(wanted, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == wanted, "if this is meant: UPDATE_DOCS=1 with the same tests"
