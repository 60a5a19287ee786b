# SPDX-License-Identifier: MIT
"""Loads in front of a pipelined loop are waited for in front of it, even if the loop has no step.

Why: where TileLang 0.1.15 gives a loop's loads to a producer, it has a tile that TMA loads before the loop waited for
in the loop's first step. A block whose loop has no step goes on, reuses the tile's memory or ends, while the load is
still on its way: it lands in what the block, or the next one on the multiprocessor, keeps there. (PTX ISA,
cp.async.bulk: shared memory has to stay the block's until the copy is complete.) Before: text of a kernel with
`if (k == 0) { wait }` inside `for (int k = 0; k < n; ++k)`. After: the wait is in front of the loop. Declines loops of
a constant extent, whose texts remain TileLang's.
"""

from __future__ import annotations

import re

from tvm import tirx

from tilelang_core.ir import constant, contains

__all__ = ["marked", "with_waits_ahead"]

_MARK = "tilescale.waits_ahead"
"""An attribute: what TileLang has kept of a function, from when nobody changed its text, is not taken for this one."""

_FIRST = re.compile(r"^ *if \((\w+) == 0\) \{\n *(mbarrier\[\d+\]\.wait\(0\);\n) *\}\n", re.MULTILINE)
_LOOP = r"^( *)for \(int {0} = 0; {0} < (.+); \+\+{0}\) \{{\n"


def marked(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, with an attribute if its text may be changed here."""
    return func.with_attr(_MARK, 1) if contains(func.body, _may_have_no_step) else func


def _may_have_no_step(node: object) -> bool:
    return isinstance(node, tirx.For) and "num_stages" in node.annotations and constant(node.extent) is None


def with_waits_ahead(text: str) -> str:
    """CUDA text in which no block leaves a load behind."""
    begin = 0
    while (wait := _FIRST.search(text, begin)) is not None:
        begin = wait.end()
        loops = list(re.finditer(_LOOP.format(wait[1]), text[: wait.start()], re.MULTILINE))
        if loops and not loops[-1][2].isdigit():
            front = loops[-1].start()
            text = text[:front] + loops[-1][1] + wait[2] + text[front : wait.start()] + text[begin:]
    return text
