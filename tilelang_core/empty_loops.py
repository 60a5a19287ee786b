# SPDX-License-Identifier: MIT
"""Loops that may have no step: what TileLang waits for only inside of them is waited for all the same.

Why: TileLang 0.1.15 counts what stands in a loop as done, however often the loop is gone through.

- Where it gives a loop's loads to a producer, a tile that TMA loads before the loop is waited for in the loop's first
  step. A block whose loop has no step goes on, reuses the tile's memory or ends, while the load is still on its way: it
  lands in what the block, or the next one on the multiprocessor, keeps there. (PTX ISA, cp.async.bulk: shared memory
  has to stay the block's until the copy is complete.)
- A barrier in a loop stands for one between what threads write before the loop and read behind it, in shared memory.

Before: CUDA text with `for (int k = 0; k < n; ++k)`, and in it `if (k == 0) { wait }` or a barrier. After: the wait is
in front of the loop, and behind it the barrier of those for whom it had no step. Declines loops of a constant extent,
whose texts remain TileLang's, and barriers that a condition inside the loop stands around.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx

from tilelang_core.ir import constant, contains

__all__ = ["may_have_no_step", "mended"]

_FIRST = re.compile(r"^ *if \((\w+) == 0\) \{\n *(mbarrier\[\d+\]\.wait\(0\);\n) *\}\n", re.MULTILINE)
_KERNEL = re.compile(r'^extern "C" __global__ void [^;]*? \{\n.*?^\}$', re.MULTILINE | re.DOTALL)
_LOOP = re.compile(r"^( *)for \(int (\w+) = 0; \2 < (.+); \+\+\2\) \{$")
_BARRIER = re.compile(r"^ *(__syncthreads\(\);|tl::__sync_thread_partial\([^;]*\);)$")


def may_have_no_step(func: tirx.PrimFunc) -> bool:
    """Whether some loop of a function may have no step: only such texts are changed here."""
    return contains(func.body, _may_have_no_step)


def _may_have_no_step(node: object) -> bool:
    return isinstance(node, tirx.For) and constant(node.extent) is None


def mended(text: str) -> str:
    """CUDA text in which no block leaves a load or a barrier out."""
    return _with_barriers_behind(_with_waits_ahead(text))


def _with_waits_ahead(text: str) -> str:
    begin = 0
    while (wait := _FIRST.search(text, begin)) is not None:
        begin = wait.end()
        loop = re.compile(_LOOP.pattern.replace(r"(\w+)", f"({wait[1]})", 1), re.MULTILINE)
        loops = list(loop.finditer(text, 0, wait.start()))
        if loops and not loops[-1][3].isdigit():
            front = loops[-1].start()
            text = text[:front] + loops[-1][1] + wait[2] + text[front : wait.start()] + text[begin:]
    return text


def _with_barriers_behind(text: str) -> str:
    """Only kernels are looked at: what device functions do is their own affair."""
    return _KERNEL.sub(lambda kernel: "\n".join(_barriers_behind(kernel[0].split("\n"))), text)


def _barriers_behind(lines: list[str]) -> Iterator[str]:
    around: list[_Brace] = []
    for line in lines:
        yield line
        barrier = _BARRIER.match(line)
        if line.lstrip().startswith("}") and around:
            closed = around.pop()
            if closed.barrier and closed.bound:
                yield f"{closed.indent}if ({closed.bound} <= 0) {{"
                yield f"{closed.indent}  {closed.barrier}"
                yield f"{closed.indent}}}"
            if around and not closed.is_conditional:
                around[-1].barrier = around[-1].barrier or closed.barrier
        if line.endswith("{"):
            around.append(_Brace.of(line))
        elif barrier is not None and around:
            around[-1].barrier = around[-1].barrier or barrier[1]


@dataclass
class _Brace:
    """What stands in braces.

    Attributes:
        bound: of a loop that may have no step: how many it has.
        barrier: the first one that all who come there execute.
    """

    indent: str
    is_conditional: bool
    bound: str = ""
    barrier: str = ""

    @classmethod
    def of(cls, line: str) -> _Brace:
        indent, loop = line[: len(line) - len(line.lstrip())], _LOOP.match(line)
        bound = loop[3] if loop is not None and not loop[3].isdigit() else ""
        return cls(indent, loop is None and line.strip() != "{", bound)
