# SPDX-License-Identifier: MIT
"""Add the waits and barriers that TileLang leaves out for loops of no step.

Why: TileLang 0.1.15 takes for granted that a loop or branch is executed, and a `while` for one step of it.

- Where it gives a loop's loads to a producer, a tile that TMA loads before the loop is waited for in the loop's first
  step. A block whose loop has trip count 0 continues, or ends, while the load is in flight. PTX ISA, cp.async.bulk:
  shared memory has to stay the block's until the copy is complete.
- A barrier inside a loop, also one inside a branch, orders accesses of shared memory before and after it. With trip
  count 0 there is none between them; between one step of a `while` and the next one there is none either.

Before: CUDA text with `for (int k = 0; k < n; ++k)`, and in it `if (k == 0) { wait }` or a barrier. After: in front of
the loop `if (n <= 0) { ... }` with that wait or barrier; a `while` has a barrier in front of each look at its
condition; both sides of a branch have one.

Declines, so that the text remains TileLang's:

- loops whose extent is at least 1 for any arguments (`blockIdx.x + 1`);
- barriers that order nothing: no access of shared memory since the last barrier, or none until the next one. Accesses
  in the next iteration of an outer loop count as before and after;
- branches on what threads differ in, whose barriers are of those that take the branch;
- barriers directly in a branch: TileLang puts its own around it, so those are the program's;
- barriers of some threads that other threads arrive at elsewhere: a partner's loop may count its steps otherwise.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvm import tirx

from tilelang_core.ir import constant, contains

_FIRST = re.compile(r"^ *if \((\w+) == 0\) \{\n *(mbarrier\[\d+\]\.wait\(0\);\n) *\}\n", re.MULTILINE)
_KERNEL = re.compile(r'^extern "C" __global__ void [^;]*? \{\n.*?^\}$', re.MULTILINE | re.DOTALL)
_LOOP = re.compile(r"^( *)for \(int (\w+) = 0; \2 < (.+); \+\+\2\) \{$")
_SET = re.compile(r"^ *(?:(?:const )?[\w:]+[ *]+)?(\w+)(\[| = )(.*)")
_BARRIER = re.compile(r"^ *(__syncthreads\(\);|tl::__sync_thread_partial\([^;]*\);)$")
_PARTIAL = re.compile(r"tl::__(?:sync_thread_partial|named_barrier_arrive)\((.*?)[,)]")
_THREADS = re.compile(r"threadIdx|elect|lane|warp")
_SHARED = re.compile(r"__shared__ .*?(?!mbarrier_mem)\b(\w+)\[")
_POINTER = re.compile(r"^ *[\w:]+ ?\*+ ?(?:const )?(\w+) = |initialize_\w*descriptor\w*(?:<[^(]*>)?\((\w+)")
_CAST = re.compile(r"\((?:unsigned |const )?(?:int|uint|int64_t|long long|uint32_t)\)")


def may_have_no_step(func: tirx.PrimFunc) -> bool:
    """Whether a function has a branch, or a loop of no constant extent: only such texts are changed here."""
    return contains(func.body, _may_have_no_step)


def _may_have_no_step(node: object) -> bool:
    return (
        isinstance(node, tirx.While | tirx.IfThenElse) or isinstance(node, tirx.For) and constant(node.extent) is None
    )


def mended(text: str) -> str:
    """CUDA text with the waits and barriers of loops without a step; device functions remain as they are."""
    return _KERNEL.sub(lambda kernel: _with_barriers(_with_waits(kernel[0])), text)


def _with_waits(text: str) -> str:
    begin, bounds = 0, _Bounds(text.split("\n"))
    while (wait := _FIRST.search(text, begin)) is not None:
        begin = wait.end()
        loop = re.compile(_LOOP.pattern.replace(r"(\w+)", f"({wait[1]})", 1), re.MULTILINE)
        loops = list(loop.finditer(text, 0, wait.start()))
        if loops and bounds.of(loops[-1][3])[0] < 1:
            front, indent = loops[-1].start(), loops[-1][1]
            added = f"{indent}if ({loops[-1][3]} <= 0) {{\n{indent}  {wait[2]}{indent}}}\n"
            text, begin = text[:front] + added + text[front:], begin + len(added)
    return text


def _with_barriers(text: str) -> str:
    kernel = _Kernel(text.split("\n"))
    kernel.complete(kernel.root)
    return "\n".join(line for i, own in enumerate(kernel.lines) for line in (*kernel.added[i], own))


# -- values -----------------------------------------------------------------------------------------------------------

Interval = tuple[float, float]
_ANY: Interval = (-math.inf, math.inf)


class _Bounds:
    """Least and greatest values of the integer expressions of a kernel, from what its lines set variables to."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._set: dict[str, list[str]] = defaultdict(list)
        for line in lines:
            if (found := _SET.match(line)) is not None and found[2] != "[":
                self._set[found[1]].append(found[3].rstrip(";"))
            elif (loop := _LOOP.match(line)) is not None:
                self._set[loop[2]].append("?")

    def of(self, text: str, above: tuple[str, ...] = ()) -> Interval:
        """The bounds of an expression; none for an unsupported one."""
        try:
            tree = ast.parse(_CAST.sub("", text).strip(), mode="eval").body
        except SyntaxError:
            return _ANY
        return self._node(tree, above)

    def _node(self, node: ast.expr, above: tuple[str, ...]) -> Interval:
        match node:
            case ast.Constant(value=int(value)):
                return value, value
            case ast.Attribute(value=ast.Name(id="blockIdx" | "threadIdx")):
                return 0, math.inf
            case ast.Name(id=name) if name in self._set and name not in above:
                every = [self.of(text, (*above, name)) for text in self._set[name]]
                return min(low for low, _ in every), max(high for _, high in every)
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[left, right], keywords=[]):
                (a, b), (c, d) = self._node(left, above), self._node(right, above)
                return (min(a, c), min(b, d)) if name == "min" else (max(a, c), max(b, d))
            case ast.BinOp(left=left, op=operation, right=right):
                return _combined(operation, self._node(left, above), self._node(right, above))
        return _ANY


def _combined(operation: ast.operator, left: Interval, right: Interval) -> Interval:
    (a, b), (c, d) = left, right
    match operation:
        case ast.Add():
            return a + c, b + d
        case ast.Sub():
            return a - d, b - c
        case ast.Mult() if c == d >= 0:
            return (0, 0) if c == 0 else (a * c, b * c)
        case ast.RShift() if c == d >= 0:
            return _quotient(a, 1 << int(c)), _quotient(b, 1 << int(c))
        case ast.Div() if c == d > 0 and a >= 0:
            return _quotient(a, c), _quotient(b, c)
    return _ANY


def _quotient(value: float, by: float) -> float:
    return value if math.isinf(value) else value // by


# -- statements of a kernel -------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """The contents of a pair of braces.

    Attributes:
        begin, end: its first and its last line.
        kind: "for", "while" and "if" of blocks that may be skipped, "else", "" for others that all execute, and "some"
            for a branch that only some threads take.
        steps: how many steps a `for` has.
        items: lines by their number, and blocks.
        other: the other side of a branch.
        barrier: the first one that all threads reaching this block execute; "" if there is none.
    """

    begin: int
    kind: str
    parent: _Block | None = None
    steps: str = ""
    other: _Block | None = None
    end: int = 0
    items: list[int | _Block] = field(default_factory=list)
    barrier: str = ""


class _Names:
    """The variables of a kernel that name shared memory, and those that may differ between threads: values that depend
    on the thread's number, and arrays in registers."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._shared = re.compile(r"(?!)")
        self._varying = _THREADS
        for line in lines:
            declared = _SHARED.search(line) or self._shared.search(line) and _POINTER.search(line)
            if declared:
                self._shared = _also(self._shared, declared[declared.lastindex or 0])
            value = _SET.match(line)
            if value is not None and (value[2] == "[" or self.varies(value[3])):
                self._varying = _also(self._varying, value[1])

    def use_shared(self, line: str) -> bool:
        """Whether a line reads or writes shared memory; one that only declares a name for it does not."""
        return self._shared.search(line) is not None and not (_SHARED.search(line) or _POINTER.search(line))

    def varies(self, expression: str) -> bool:
        return self._varying.search(expression) is not None


def _also(names: re.Pattern[str], name: str) -> re.Pattern[str]:
    return re.compile(rf"{names.pattern}|\b{name}\b")


# -- barriers ---------------------------------------------------------------------------------------------------------


class _Kernel:
    """The lines of a kernel, as blocks. `added`: insertions in front of a line, by its number."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.added: dict[int, list[str]] = defaultdict(list)
        self._bounds, self._names = _Bounds(lines), _Names(lines)
        self._arrivals: dict[str, set[tuple[str, ...]]] = defaultdict(set)  # in which branches
        self.root = around = _Block(0, "")
        for number, line in enumerate(lines[1:], 1):
            closed = line.strip().startswith("}") and around.parent is not None
            if closed:
                around.end, around = number, around.parent or around
            if line.endswith("{"):
                around.items.append(around := self._block(number, around))
            else:
                around.items.append(number)
                for name in _PARTIAL.findall(line):
                    self._arrivals[name].add(tuple(self._branches(around)))

    def _block(self, number: int, around: _Block) -> _Block:
        line = self.lines[number]
        words, loop = line.strip(), _LOOP.match(line)
        if loop is not None:
            return _Block(number, "for" if self._bounds.of(loop[3])[0] < 1 else "", around, steps=loop[3])
        if words == "while (1) {":
            return _Block(number, "while", around)
        first = around.items[-1] if around.items else None
        if words == "} else {" and isinstance(first, _Block) and first.kind == "if":
            first.other = _Block(number, "else", around, other=first)
            return first.other
        if words == "{":
            return _Block(number, "", around)
        return _Block(number, "if" if words.startswith("if (") and not self._names.varies(words) else "some", around)

    def _branches(self, block: _Block | None) -> Iterable[str]:
        """The branches on threads around a statement, each by what its threads are."""
        while block is not None:
            if block.kind == "some":
                yield self.lines[block.begin].strip() + (str(block.begin) if "else" in self.lines[block.begin] else "")
            block = block.parent

    # -- which are needed --

    def _uses(self, items: Iterable[int | _Block], direction: int) -> bool | None:
        """Whether items, with the step `direction`, use shared memory before a barrier; None without either."""
        for item in items:
            if isinstance(item, int):
                if _BARRIER.match(self.lines[item]):
                    return False
                if self._names.use_shared(self.lines[item]):
                    return True
                continue
            inside = self._names.use_shared(self.lines[item.begin]) or self._uses(item.items[::direction], direction)
            if inside or item.barrier or inside is False and item.kind == "":
                return bool(inside)
        return None

    def _used(self, block: _Block, direction: int) -> bool:
        """Whether shared memory is used between a block and the last barrier before it (-1), or the next (1)."""
        while (around := block.parent) is not None:
            line = around.items[::direction]
            place = next(i for i, item in enumerate(line) if item is block)
            beyond = [item for item in line[place + 1 :] if item is not block.other]
            found = self._uses(beyond, direction)
            if found is None and (around.kind in ("for", "while") or around.steps):
                found = self._uses(line[: place + 1], direction) or None
            if found is not None:
                return found
            block = around
        return False

    def _is_needed(self, block: _Block) -> bool:
        return self._used(block, -1) and self._used(block, 1)

    def _is_of_its_threads(self, barrier: str) -> bool:
        """Whether all that arrive at a barrier take the same branch: none of them has a partner elsewhere."""
        return all(len(self._arrivals[name]) == 1 for name in _PARTIAL.findall(barrier))

    # -- insertions --------------------------------------------------------------------------------------------------

    def complete(self, block: _Block) -> str:
        """Add the missing barriers in and around a block; returns the one that all threads reaching the block
        execute."""
        barrier = ""
        for item in block.items:
            if isinstance(item, _Block):
                inner = self.complete(item)
                barrier = barrier or inner
            elif block.kind not in ("if", "else") and (own := _BARRIER.match(self.lines[item])) is not None:
                barrier = barrier or own[1]
        block.barrier = self._for_all(block, barrier)
        return "" if block.kind == "if" and block.other is not None else block.barrier

    def _for_all(self, block: _Block, barrier: str) -> str:
        """The barrier of a block as one for all threads that reach the block; "" if it is not for all."""
        if block.kind == "some" or not self._is_of_its_threads(barrier):
            return ""
        if block.kind == "else" and block.other is not None:
            return self._on_both_sides(block.other, block, barrier)
        if not (barrier and block.kind) or block.other is not None:
            return barrier
        if block.kind == "while":
            return self._at_each_look(block, barrier)
        if not self._is_needed(block):
            return ""
        indent = self._indent(block)
        if block.kind == "if":
            self.added[block.end] += [f"{indent}}} else {{", f"{indent}  {barrier}"]
        else:
            self.added[block.begin] += [f"{indent}if ({block.steps} <= 0) {{", f"{indent}  {barrier}", f"{indent}}}"]
        return barrier

    def _on_both_sides(self, first: _Block, second: _Block, barrier: str) -> str:
        both = first.barrier or barrier
        if bool(first.barrier) != bool(barrier):
            lacks = second if first.barrier else first
            before = self._uses(lacks.items[::-1], -1)
            if not (self._used(lacks, -1) if before is None else before) or not self._used(lacks, 1):
                first.barrier = ""
                return ""
            self.added[lacks.end].append(f"{self._indent(lacks)}  {both}")
        first.barrier = both
        return both

    def _at_each_look(self, block: _Block, barrier: str) -> str:
        """A barrier before a `while`'s condition, and one after it where the condition reads memory that iterations
        write."""
        between = self._uses(block.items[::-1], -1) and self._uses(block.items, 1)
        if not between and not self._is_needed(block):
            return ""
        look, *body = block.items
        added = f"{self._indent(block)}  {barrier}"
        self.added[block.begin + 1].append(added)
        if isinstance(look, int) and self._names.use_shared(self.lines[look]) and self._uses(body, 1):
            self.added[look + 1].append(added)
        return barrier

    def _indent(self, block: _Block) -> str:
        line = self.lines[block.begin]
        return line[: len(line) - len(line.lstrip())]
