# SPDX-License-Identifier: MIT
"""Loops and branches that may not be gone through: what TileLang waits for only inside of them is waited for anyway.

Why: TileLang 0.1.15 counts what stands in a loop or a branch as done, however often it is gone through, and a `while`
as gone through once.

- Where it gives a loop's loads to a producer, a tile that TMA loads before the loop is waited for in the loop's first
  step. A block whose loop has no step goes on, reuses the tile's memory or ends, while the load is still on its way: it
  lands in what the block, or the next one on the multiprocessor, keeps there. (PTX ISA, cp.async.bulk: shared memory
  has to stay the block's until the copy is complete.)
- A barrier in a loop, also one in a branch, stands for one between what threads write before and read behind it, in
  shared memory; and between a step of a `while` and the next one there is none.

Before: CUDA text with `for (int k = 0; k < n; ++k)`, and in it `if (k == 0) { wait }` or a barrier. After: the wait is
in front of the loop, and behind it the barrier of those for whom it had no step; a `while` with a barrier has one in
front of each look at its condition; of a branch's two sides both have one, if one has a loop with a barrier. Declines
loops of a constant extent, whose texts remain TileLang's; branches on what threads differ in, whose barriers are of
those that take the branch; and barriers directly in a branch: TileLang puts its own around it, so those are the
program's, which says when they are to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tvm import tirx

from tilelang_core.ir import constant, contains

__all__ = ["may_be_left_out", "mended"]

_FIRST = re.compile(r"^ *if \((\w+) == 0\) \{\n *(mbarrier\[\d+\]\.wait\(0\);\n) *\}\n", re.MULTILINE)
_KERNEL = re.compile(r'^extern "C" __global__ void [^;]*? \{\n.*?^\}$', re.MULTILINE | re.DOTALL)
_LOOP = re.compile(r"^( *)for \(int (\w+) = 0; \2 < (.+); \+\+\2\) \{$")
_SET = re.compile(r"^ *(?:(?:const )?[\w:]+ )?(\w+)(\[| = )")
_BARRIER = re.compile(r"^ *(__syncthreads\(\);|tl::__sync_thread_partial\([^;]*\);)$")


def may_be_left_out(func: tirx.PrimFunc) -> bool:
    """Whether a function has a branch, or a loop of no constant extent: only such texts are changed here."""
    return contains(func.body, _may_be_left_out)


def _may_be_left_out(node: object) -> bool:
    return (
        isinstance(node, tirx.While | tirx.IfThenElse) or isinstance(node, tirx.For) and constant(node.extent) is None
    )


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


def _barriers_behind(lines: list[str]) -> list[str]:
    """Lines of a kernel, in which whatever has a barrier inside has one for all who come there."""
    out: list[str] = []
    around: list[_Brace] = []
    varying = _Varying()
    for line in lines:
        words = line.strip()
        closed = around.pop() if words.startswith("}") and around else None
        if closed is not None:
            closed.end = len(out)
        out.append(line)
        opened = _Brace.of(line, len(out), varying) if line.endswith("{") else None
        if opened is not None and closed is not None:
            opened.before = closed  # `} else {`
        elif closed is not None and (barrier := closed.completed(out)) and around:
            around[-1].barrier = around[-1].barrier or barrier
        if opened is not None:
            around.append(opened)
        elif (barrier := _BARRIER.match(line)) is not None and around and around[-1].kind not in ("if", "else"):
            around[-1].barrier = around[-1].barrier or barrier[1]
        varying.see(line)
    return out


class _Varying:
    """Names of a kernel's variables that may differ between threads: those that follow from the thread's number, and
    arrays in registers."""

    def __init__(self) -> None:
        self._names = re.compile(r"threadIdx|elect|lane|warp")

    def see(self, line: str) -> None:
        """Take note of what a line declares or sets."""
        name = _SET.match(line)
        if name is not None and (name[2] == "[" or self.has(line[name.end() :])):
            self._names = re.compile(rf"{self._names.pattern}|\b{name[1]}\b")

    def has(self, text: str) -> bool:
        """Whether an expression names one."""
        return self._names.search(text) is not None


@dataclass
class _Brace:
    """What stands in braces.

    Attributes:
        begin, end: the place of its first line, and behind its last one, in what is made.
        kind: "for", "while" and "if" of what may be left out, "else", "" for others that all come through, and "some"
            for a branch that only some threads take.
        bound: of a loop that may have no step: how many it has.
        before: of `else`: the other side.
        barrier: the first one that all who come there execute.
    """

    indent: str
    begin: int
    kind: str
    bound: str = ""
    before: _Brace | None = None
    barrier: str = ""
    end: int = 0

    @classmethod
    def of(cls, line: str, begin: int, varying: _Varying) -> _Brace:
        words = line.strip()
        indent, loop = line[: len(line) - len(line.lstrip())], _LOOP.match(line)
        if loop is not None:
            return cls(indent, begin, "for", "" if loop[3].isdigit() else loop[3])
        if words == "while (1) {":
            return cls(indent, begin, "while")
        if words == "} else {":
            return cls(indent, begin, "else")
        if words.startswith("if (") and not varying.has(words):
            return cls(indent, begin, "if")
        return cls(indent, begin, "" if words == "{" else "some")

    def completed(self, out: list[str]) -> str:
        """Add to a text, of which this is the end, the barriers that are missing; the one that all then execute."""
        if self.kind == "else" and self.before is not None:
            return self._both_sides(self.before, out)
        if self.kind == "some" or not self.barrier:
            return ""
        if self.kind == "while":
            check = out[self.begin]
            out.insert(self.begin + 1, f"{self.indent}  {self.barrier}") if "[" in check else None
            out.insert(self.begin, f"{self.indent}  {self.barrier}")
        elif self.kind == "if":
            out[-1:] = [f"{self.indent}}} else {{", f"{self.indent}  {self.barrier}", f"{self.indent}}}"]
        elif self.bound:
            out += [f"{self.indent}if ({self.bound} <= 0) {{", f"{self.indent}  {self.barrier}", f"{self.indent}}}"]
        return self.barrier

    def _both_sides(self, first: _Brace, out: list[str]) -> str:
        if first.kind != "if":
            return ""
        barrier = first.barrier or self.barrier
        if barrier and not self.barrier:
            out.insert(self.end, f"{self.indent}  {barrier}")
        if barrier and not first.barrier:
            out.insert(first.end, f"{self.indent}  {barrier}")
        return barrier
