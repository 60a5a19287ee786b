# SPDX-License-Identifier: MIT
"""One array in registers for what sibling units hold of a tile.

Why: a fragment belongs to one range of threads, so each unit's is a buffer of its own, and in the text an array that
every thread has. A thread uses only its unit's, but where branches join again the compiler keeps all of them alive:
accumulators of two warpgroups then spill, and their products run one after another. Before: text with a line that names
such arrays. After: the first stands for all of them. Declines arrays of other types or extents than the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MARK = "// one array: "


def marks(groups: Iterable[list[str]]) -> str:
    """Lines of a text that say which of its arrays may be one: no thread uses two of a group."""
    return "".join(f"{_MARK}{' '.join(names)}\n" for names in groups)


def one_array_each(text: str) -> str:
    """A text in which each marked group of arrays is one array; the marks are gone."""
    groups = [found[1].split() for found in re.finditer(rf"^{_MARK}(.*)\n", text, re.MULTILINE)]
    text = re.sub(rf"^{_MARK}.*\n", "", text, flags=re.MULTILINE)
    for names in groups:
        text = _joined(text, names)
    return text


def _joined(text: str, names: list[str]) -> str:
    # Only the whole kernel's: a tile declared in a block is not visible outside of it.
    found = {name: re.search(rf"^  (\S.*?) {name}(\[\d+\]);\n", text, re.MULTILINE) for name in names}
    declared = {name: line for name, line in found.items() if line is not None}
    kinds = {name: (line[1], line[2]) for name, line in declared.items()}
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if name != first and kind == kinds[first]:
            text = re.sub(rf"\b{name}\b", first, text.replace(declared[name][0], "", 1))
    return text
