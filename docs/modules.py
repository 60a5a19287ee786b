# SPDX-License-Identifier: MIT
"""List the files of folders with the first sentence of each docstring.

python -m docs.modules              every file of the product
python -m docs.modules tilescale/ops
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("tilescale", "tilelang_core")


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def listed(folder: Path) -> Iterator[str]:
    """A folder and its files, then the folders in it, a line each."""
    yield f"{folder.as_posix()}/  {sentence(folder / '__init__.py')}"
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    width = max((len(path.name) for path in files), default=0)
    yield from (f"    {path.name:{width}}  {sentence(path)}" for path in files)
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield ""
        yield from listed(inner)


if __name__ == "__main__":
    for top in sys.argv[1:] or PRODUCT:
        print("\n".join(listed(Path(top))), end="\n\n")
