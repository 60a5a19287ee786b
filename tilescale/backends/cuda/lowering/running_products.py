# SPDX-License-Identifier: MIT
"""Tiles of a loop are given back when the products that read them are over, not when the step is.

Why: with `T.gemm(..., annotations={"wg_wait": 1})` a step ends while its product runs. So the next one is there before
tensor cores are done with it: no wait, arrival or address stands between the two, as in CUTLASS's main loops for
sm_90. But a step ends by giving its tiles back to who loads the next ones, which would be written while they are read.
Before: text with a loop whose step waits for tiles, multiplies without waiting for the last product, and gives tiles
back. After: a step gives back those of the one before it, whose products are over; behind the loop all products are
waited for, and the last tiles given back. Where all steps have the same tiles, and outside of such loops, a product is
waited for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WAIT = re.compile(r"tl::warpgroup_wait<(\d+)>\(\);")
_RUNNING = re.compile(r"tl::warpgroup_wait<[1-9]\d*>\(\);")
_DONE = "tl::warpgroup_wait<0>();"
_COMMIT = "tl::warpgroup_commit_batch();"
_LOOP = re.compile(r"^( *)for \(int (\w+) = 0; \2 < (.+); \+\+\2\) \{$")
_TAKEN = re.compile(r"^ *\w+\[(.+)\]\.wait\(.*\);$")
_FENCE = re.compile(r"^ *(tl::warpgroup_fence_operand\(.*\);)$")
_GIVEN = re.compile(r"^ *\w+\[.+\]\.arrive\(.*\);$")
_AROUND = re.compile(r"^ *(__syncwarp\(\);|if \(.*\) \{|\})$")


def given_back_late(text: str) -> str:
    """A text in which nobody loads tiles that a running product reads."""
    if _RUNNING.search(text) is None:
        return text
    lines, made, at = text.split("\n"), list[str](), 0
    while at < len(lines):
        loop = _LOOP.match(lines[at])
        end = lines.index(f"{loop[1]}}}", at) if loop else at
        changed = _late(loop, lines[at + 1 : end]) if loop else None
        made += changed or [_RUNNING.sub(_DONE, lines[at])]
        at = end + 1 if changed else at + 1
    return "\n".join(made)


def _late(loop: re.Match[str], body: Sequence[str]) -> list[str] | None:
    """A loop whose steps leave a product running, and what follows it; None if it is not one."""
    indent, step, count = loop.groups()
    waits = [number for number, line in enumerate(body) if _WAIT.search(line)]
    if not waits or not _RUNNING.search(body[waits[-1]]):
        return None
    behind = body.index(f"{indent}  }}", waits[-1]) + 1
    early = [line for line in body[:behind] if _GIVEN.match(line) and line[len(indent) + 2] != " "]
    products, given = [line for line in body[:behind] if line not in early], [*early, *body[behind:]]
    if not _takes(products, step, given) or any(map(_GIVEN.match, products)):
        return None
    own = sum(_COMMIT in line for line in products)
    products = [_WAIT.sub(lambda wait: f"tl::warpgroup_wait<{min(int(wait[1]), own)}>();", line) for line in products]
    fences = dict.fromkeys(f"{indent}{fence[1]}" for line in products if (fence := _FENCE.match(line)))
    before = _when(f"{indent}  ", f"{step} > 0", _of(given, step, f"({step} - 1)"))
    last = [line[2:] for line in _of(given, step, f"({count} - 1)")]
    last = last if count.isdigit() else _when(indent, f"{count} > 0", last)
    return [loop[0], *products, *before, f"{indent}}}", f"{indent}{_DONE}", *fences, *last]


def _takes(products: Sequence[str], step: str, given: Sequence[str]) -> bool:
    """Whether products begin by waiting for tiles that differ from step to step, and `given` only gives these back."""
    taken = _TAKEN.match(products[0])
    if taken is None or not re.search(rf"\b{step}\b", taken[1]):
        return False
    back = [line for line in given if _GIVEN.match(line)]
    rest = [line for line in given if line not in back]
    return bool(back) and all(taken[1] in line for line in back) and all(map(_AROUND.match, rest))


def _of(lines: Sequence[str], step: str, other: str) -> list[str]:
    """The same of another step."""
    return [re.sub(rf"\b{step}\b", other, line) for line in lines]


def _when(indent: str, condition: str, lines: Sequence[str]) -> list[str]:
    return [f"{indent}if ({condition}) {{", *(f"  {line}" for line in lines), f"{indent}}}"]
