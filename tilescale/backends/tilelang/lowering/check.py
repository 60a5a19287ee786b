# SPDX-License-Identifier: MIT
"""Invariants of generated text, checked before compilation: the order around signals and waits, loads, shared memory.

Why: the stock compiler moves, merges, predicates and specializes statements and knows nothing of other devices, so
another version may not keep the order that one version keeps. A wrong kernel would hang or return stale data; this
check turns it into an error that names the generated line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilelang_core import specialise
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.ptx import WARP
from tilescale.errors import AllocationTooLargeError, Location
from tilescale.hda import Machine

KERNEL = re.compile(r'^extern "C" __global__ void .*\b(\w+)\((.*)\) \{$')
BOUNDS = re.compile(r"__launch_bounds__\((\d+)")
WAIT = re.compile(r"\btilescale::(wait(_any)?<|barrier\w*\()")
ELECTED, ELECTED_OF_WARP = (f"tl_shuffle_elect<{threads}>" for threads in (specialise.PRODUCER_THREADS, WARP))
BEGIN, END = re.compile(r"\((\d+) <= \(\(int\)threadIdx\.x\)\)"), re.compile(r"\(\(\(int\)threadIdx\.x\) < (\d+)\)")
GATE = re.compile(r"\btilescale::wait_by_producer<")
RELEASED = re.compile(r"^released\w*\[0\]\.wait\(")
"""The point where the producer waits until the consumers have reached a loop, and the flags of its loads are set."""
ENTRY = re.compile(r"\btilescale::enter\(")
SIGNAL = re.compile(r"\btilescale::(signal(_pe)?<|release<|barrier\w*\(|leave\()")
KEEP = re.compile(r"^(\w+) = tilescale::address\(")
BULK_STORE = re.compile(r"\btl::tma_store\w*\((?!\))")
BY_ALL = "tilescale::complete_stores();"
COMPLETION = re.compile(r"^tilescale::complete_stores(<\d+>)?\(\);$")
DRAINING = re.compile(r"^tilescale::(barrier\w*\(|leave\(|signal_pe<)")  # they begin with their own drain()
ACQUIRED = "tilescale::acquired();"
BLOCK_SYNC = "__syncthreads();"
SYNC = re.compile(r"^(__syncthreads\(\)|tl::__sync_thread_partial\b.*|__syncwarp\(.*|tl::\w*cluster_sync\(\));$")
ONE_THREAD = re.compile(r"threadIdx\.[xyz]\)?( & \d+\))?\)* == |tl_shuffle_elect<")
BOUND = re.compile(r" <=? ")
BULK_LOAD = re.compile(r"\btl::(tma_load|cp_async)")
READ_ONLY_LOAD = re.compile(r"__ldg\(|ld\.global\.nc|tl::\w*ldg\w*\(")
HARMLESS = re.compile(
    r"^(#pragma .*|tilescale::(wait<|signal(_pe)?<|release<|barrier\w*\(|acquired\().*|tl::fence_proxy_async\(\);"
    r"|(const )?(int|int64_t|bool|float|uint|void\*) ?\*? ?\w+( = .*|\[\d+\])?;)$"
)
"""Statements allowed between the end of a program's stores and the signal that publishes them."""
STATIC = re.compile(r"^\s*__shared__ .*?([\w:]+) (\w+)((?:\[\d+\])+);", re.MULTILINE)
BROADCAST, BROADCAST_BYTES = re.compile(r"\btilescale::broadcast<(\d+)"), 8
"""A value that one thread broadcasts has its own shared memory (broadcast.cuh)."""
_BYTES = {
    "char": 1,
    "uchar": 1,
    "signed char": 1,
    "half_t": 2,
    "bfloat16_t": 2,
    "double": 8,
    "int64_t": 8,
    "uint64_t": 8,
}


class GeneratedTextError(RuntimeError):
    """Generated text that must not run: a bug of TileScale or of the compiler below it, not of a program."""


@dataclass
class TextNode:
    """A statement, or a block with its statements; `text` is the statement, or the text before the brace."""

    text: str
    line: int
    parent: TextNode | None = None
    children: list[TextNode] = field(default_factory=list)
    is_block: bool = False

    @property
    def around(self) -> list[TextNode]:
        """The blocks around it, innermost first, without the kernel itself."""
        found, at = [], self.parent
        while at is not None and at.parent is not None:
            found.append(at)
            at = at.parent
        return found

    @property
    def before(self) -> list[TextNode]:
        """Its siblings before it, the nearest first."""
        return self.parent.children[: self.position][::-1] if self.parent else []

    @property
    def after(self) -> list[TextNode]:
        """Its siblings after it."""
        return self.parent.children[self.position + 1 :] if self.parent else []

    @property
    def position(self) -> int:
        """Its index among its siblings."""
        siblings = self.parent.children if self.parent is not None else []
        return next(i for i, node in enumerate(siblings) if node is self)

    @property
    def by_thread(self) -> bool:
        """Whether it is a thread-dependent branch."""
        return self.is_block and ("threadIdx" in self.text or "tl_shuffle_elect" in self.text)

    def leaves(self) -> Iterator[TextNode]:
        """All statements in it, in order."""
        if not self.is_block:
            yield self
        for child in self.children:
            yield from child.leaves()


@dataclass
class KernelText:
    """One kernel's text. A kernel of a single thread has no launch bounds."""

    name: str
    parameters: str
    threads: int
    body: TextNode

    def fail(self, what: str, node: TextNode) -> GeneratedTextError:
        """The error for an invalid line."""
        return GeneratedTextError(f"{self.name}: {what}, in line {node.line} of the generated text: {node.text[:160]}")


def check_text(
    text: str,
    remote: frozenset[str] = frozenset(),
    ahead: frozenset[str] = frozenset(),
    free: frozenset[str] = frozenset(),
) -> None:
    """Check the CUDA text of one or more kernels. Raises GeneratedTextError: a violated invariant, with the line of the
    text.

    Args:
        remote: names of the tensors that other devices write, as the text names them.
        ahead: names of those that a producer may load ahead of the consumers' waits.
        free: names of those that it may load ahead of its own waits, too.
    """
    for kernel in kernels(text):
        if "__restrict__" in kernel.parameters:
            raise kernel.fail("a __restrict__ pointer lets loads move ahead of waits", kernel.body)
        for node in kernel.body.leaves():
            if READ_ONLY_LOAD.search(node.text):
                _check_read_only(kernel, node, remote)
            if node.text == BLOCK_SYNC and any(block.by_thread for block in node.around):
                raise kernel.fail("a barrier of the block in a branch that not all of its threads take", node)
            if WAIT.search(node.text) or SIGNAL.search(node.text):
                _check_guard(kernel, node)
            if WAIT.search(node.text):
                _check_wait(kernel, node, ahead)
            if ENTRY.search(node.text):
                _check_entry(kernel, node)
            if GATE.search(node.text):
                _check_gate(kernel, node, free)
            if KEEP.search(node.text):
                _check_kept(kernel, node)
            if SIGNAL.search(node.text):
                _check_signal(kernel, node)


@dataclass(frozen=True)
class KernelCheck:
    """The check of one kernel: its text, and the shared memory of one program of it.

    Attributes:
        name: name of the program.
        remote, ahead, free: as for `check_text`, sorted.
        machine: the machine, for its shared memory.
        where: the user's launch.
    """

    name: str
    remote: tuple[str, ...]
    ahead: tuple[str, ...]
    free: tuple[str, ...]
    available: int
    machine: Machine = field(repr=False)
    where: tuple[Location, ...] = field(repr=False)

    @classmethod
    def of(cls, name: str, remote: frozenset[str], kernel: LoweredKernel, machine: Machine) -> KernelCheck:
        """The check of a program's kernel, of which other devices write `remote`."""
        available = machine.capacity(machine.layer_for("shared").name)
        names, ahead, free = (tuple(sorted(group)) for group in (remote, kernel.ahead, kernel.free))
        return cls(name, names, ahead, free, available, machine, kernel.where)

    def __call__(self, text: str, dynamic_shared: int) -> None:
        """Raises GeneratedTextError or AllocationTooLargeError."""
        check_text(text, frozenset(self.remote), frozenset(self.ahead), frozenset(self.free))
        check_shared(self.name, dynamic_shared + static_shared_bytes(text), self.machine, self.where)


def _check_read_only(kernel: KernelText, node: TextNode, remote: frozenset[str]) -> None:
    names = set(re.findall(r"\w+", node.text))
    found = sorted(names & remote) or sorted(n for n in names if n.endswith("_peers"))
    if found:
        raise kernel.fail(f"a read-only load of {found[0]!r}, which other devices write", node)


def _guard(node: TextNode) -> TextNode | None:
    """The innermost thread-dependent branch around a statement."""
    return next((block for block in node.around if block.by_thread), None)


def _check_guard(kernel: KernelText, node: TextNode) -> None:
    """Check that one thread signals or waits, under no other condition than that it is this thread."""
    guard = _guard(node)
    if kernel.threads == 1:
        return
    if guard is None or not ONE_THREAD.search(guard.text):
        raise kernel.fail("more than one thread signals or waits", node)
    inner = node.around[: next(i for i, block in enumerate(node.around) if block is guard)]
    bounded = [block for block in inner if block.text.startswith(("if", "else"))]
    if any("threadIdx" not in part and BOUND.search(part) for part in guard.text.split("&&")):
        bounded.append(guard)
    if bounded:
        raise kernel.fail("a bounds predicate around a signal or wait", bounded[0])


def _role(node: TextNode) -> tuple[int, ...]:
    """The branches on the thread index around a statement, except tests that select one thread."""
    return tuple(id(b) for b in node.around if b.by_thread and not ONE_THREAD.search(b.text))


def _check_wait(kernel: KernelText, node: TextNode, ahead: frozenset[str]) -> None:
    """Check that after a wait all threads of its branch synchronize and order their bulk copies, and no other role
    issues bulk loads."""
    at = node if kernel.threads == 1 else _guard(node)
    assert at is not None, "_check_guard comes first"
    following = [n for n in at.after if n.is_block or not n.text.startswith("#pragma")]
    if following and SYNC.match(following[0].text):
        following = following[1:]
    elif kernel.threads > 1:
        raise kernel.fail("threads do not synchronize after a wait", node)
    if following and following[0].text != ACQUIRED and not WAIT.search(following[0].text):
        raise kernel.fail("loads may run ahead of a wait", node)
    role = _role(node)
    if role:
        for leaf in kernel.body.leaves():
            elsewhere = BULK_LOAD.search(leaf.text) and _role(leaf)[-len(role) :] != role
            if elsewhere and not _is_of(leaf, ahead) and not _is_held_back(kernel, leaf):
                raise kernel.fail(f"a wait outside the role that loads in line {leaf.line}", node)


def _check_entry(kernel: KernelText, node: TextNode) -> None:
    """Check that the role that loads from other devices is the one that waits until they have arrived."""
    role = _role(node)
    for leaf in kernel.body.leaves():
        if role and BULK_LOAD.search(leaf.text) and "_peers_desc" in leaf.text and _role(leaf)[-len(role) :] != role:
            raise kernel.fail(f"devices synchronize outside the role that loads from them in line {leaf.line}", node)


def _is_of(load: TextNode, tensors: frozenset[str]) -> bool:
    return bool({name.removesuffix("_desc") for name in re.findall(r"\w+", load.text)} & tensors)


def _is_held_back(kernel: KernelText, load: TextNode) -> bool:
    before = [leaf for leaf in kernel.body.leaves() if leaf.line < load.line and _role(leaf) == _role(load)]
    return any(GATE.search(leaf.text) or RELEASED.match(leaf.text) for leaf in before)


def _check_gate(kernel: KernelText, node: TextNode, free: frozenset[str]) -> None:
    """Check that a producer's wait is before every load of its loop, in all its threads, and that the waiting warp
    issues the loads; except for tensors that the wait does not order. Other loops have their own waits."""
    if any(block.by_thread and ONE_THREAD.search(block.text) for block in node.around):
        raise kernel.fail("a producer's wait in a branch of one thread", node)
    loops = [block for block in node.around if block.text.startswith(("for", "while"))]
    loop = loops[0] if loops else kernel.body
    loads = [leaf for leaf in kernel.body.leaves() if BULK_LOAD.search(leaf.text) and _role(leaf) == _role(node)]
    if not loads:
        raise kernel.fail("a wait outside the role that loads", node)
    for load in loads:
        if any(block is loop for block in (*load.around, kernel.body)):
            is_wrong = load.line < node.line and not _is_of(load, free)
        else:
            inner = next((block for block in load.around if block.text.startswith(("for", "while"))), kernel.body)
            is_wrong = inner is kernel.body or inner in node.around
        if is_wrong:
            raise kernel.fail(f"a wait does not come before the load in line {load.line}", node)
        if not _is_by_first_warp(load):
            raise kernel.fail(f"a producer waits for what other threads load in line {load.line}", node)


def _is_by_first_warp(load: TextNode) -> bool:
    """Whether one thread of the first warp of its role issues a load."""
    heads = [block.text for block in load.around]
    if any(ELECTED in head for head in heads):
        return True
    begins, ends = ([int(found[1]) for head in heads if (found := test.search(head))] for test in (BEGIN, END))
    return any(ELECTED_OF_WARP in head for head in heads) and any(end - WARP in begins for end in ends)


def _check_signal(kernel: KernelText, node: TextNode) -> None:
    """Backwards from a signal: the threads synchronize, and before this each has completed its stores."""
    guard = _guard(node)
    if guard is not None and any(_completes(inner) for inner in guard.children):
        return _check_issuer(kernel, node, guard)
    synchronized, at = kernel.threads == 1, node
    while at.parent is not None:
        for previous in at.before:
            if previous.text == BY_ALL:
                if not synchronized:
                    raise kernel.fail("threads do not synchronize between their stores and a signal", node)
                return
            synchronized = synchronized or bool(SYNC.match(previous.text))
            _check_harmless(kernel, previous, node)
        at = at.parent
        if at.text.startswith(("for", "while", "do")):
            for inner in at.children:
                _check_harmless(kernel, inner, node)
    raise kernel.fail("a signal before the stores that it publishes are complete", node)


def _completes(node: TextNode) -> bool:
    """Whether a thread completes its stores here, unless all threads have done so before they synchronized."""
    if DRAINING.match(node.text):
        guard = _guard(node)
        assert guard is not None, "one thread completes them"
        return BY_ALL not in [previous.text for previous in guard.before[:2]]
    return COMPLETION.match(node.text) is not None


def _check_issuer(kernel: KernelText, node: TextNode, guard: TextNode) -> None:
    """A signal by the thread that issued all bulk stores: it completes them, after all threads have synchronized."""
    completed = next(inner for inner in guard.children if _completes(inner))
    if completed.line > node.line:
        raise kernel.fail("a signal before the stores that it publishes are complete", node)
    for between in guard.children[completed.position + 1 :]:
        if between.line < node.line:  # TileLang merges statements of the same thread into the branch
            _check_harmless(kernel, between, node)
    for leaf in kernel.body.leaves():
        by = _guard(leaf)
        if BULK_STORE.search(leaf.text) and (by is None or by.text != guard.text):
            raise kernel.fail(f"a signal by another thread than the one that stores in line {leaf.line}", node)
    before = [previous.text for previous in guard.before if previous.text != ACQUIRED]
    if not before or not SYNC.match(before[0]):
        raise kernel.fail("threads do not synchronize between their stores and a signal", node)


def _check_kept(kernel: KernelText, node: TextNode) -> None:
    """Check that a deferred signal is sent after the last iteration of its loop, and in each iteration before any
    statement that may wait."""
    kept = KEEP.search(node.text)
    assert kept is not None
    released = re.compile(rf"\btilescale::release<.*\({kept[1]},")
    loops = [block for block in node.around if block.text.startswith(("for", "while"))]
    later = [leaf for leaf in kernel.body.leaves() if leaf.line > node.line]
    outside = [leaf for leaf in later if not loops or loops[-1] not in leaf.around]
    if not any(released.search(leaf.text) for leaf in outside):
        raise kernel.fail("a signal that is kept back is never sent", node)
    if loops:
        inside = [leaf for leaf in loops[-1].leaves() if released.search(leaf.text) or WAIT.search(leaf.text)]
        if not inside or not released.search(inside[0].text):
            raise kernel.fail("a signal that is kept back across a wait", node)


def _check_harmless(kernel: KernelText, between: TextNode, signal: TextNode) -> None:
    for leaf in between.leaves():
        if not SYNC.match(leaf.text) and not HARMLESS.match(leaf.text):
            raise kernel.fail(f"a signal that does not wait for the statement in line {leaf.line}", signal)


# -- shared memory -----------------------------------------------------------------------------------------------------


def static_shared_bytes(text: str) -> int:
    """Bytes of the shared arrays that a text declares with an extent."""
    total = 0
    for dtype, _, extents in STATIC.findall(text):
        total += _BYTES.get(dtype, 4) * math.prod(int(n) for n in re.findall(r"\d+", extents))
    return total + BROADCAST_BYTES * len(set(BROADCAST.findall(text)))


def check_shared(name: str, asked: int, machine: Machine, where: Sequence[Location] = ()) -> None:
    """Check a program's use of the machine's memory of scope "shared", in bytes. Raises AllocationTooLargeError: more
    than the machine has for one program."""
    layer = machine.layer_for("shared")
    available = machine.capacity(layer.name)
    if asked > available:
        raise AllocationTooLargeError(
            f"{name!r} takes {asked} bytes of {layer.title or layer.name} in one program, {machine.name} has "
            f"{available}: tiles, their pipeline stages and staging of collectives",
            hint="use smaller tiles or fewer pipeline stages (num_stages=)",
            where=where,
        )


# -- reading the text --------------------------------------------------------------------------------------------------


def kernels(text: str) -> Iterator[KernelText]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        header = KERNEL.match(line)
        if header:
            bounds = BOUNDS.search(line)
            body = _tree(lines, number)
            yield KernelText(header[1], header[2], int(bounds[1]) if bounds else 1, body)


def _tree(lines: list[str], first: int) -> TextNode:
    """The blocks of the kernel whose first line has this index."""
    root = at = TextNode(lines[first].strip(), first + 1, is_block=True)
    for number, line in enumerate(lines[first + 1 :], first + 2):
        statement = line.strip()
        if statement.startswith("}"):
            if at.parent is None:
                return root
            at, statement = at.parent, statement[1:].strip()
        if statement.endswith("{"):
            block = TextNode(statement[:-1].strip(), number, at, is_block=True)
            if block.text.startswith("else"):
                # The else branch of a test on the thread index is one too.
                block.text = f"{block.text} ({at.children[-1].text})"
            at.children.append(block)
            at = block
        elif statement and not statement.startswith("//"):
            at.children.append(TextNode(statement, number, at))
    raise GeneratedTextError(f"a kernel without an end, in line {first + 1} of the generated text")
