# SPDX-License-Identifier: MIT
"""One PE executes a program: its control flow is followed, its accesses and calls are written down.

Conditions are known, as they depend on the PE's number. What memory holds is not: reads of it stay expressions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.corpus.rmaracebench.c import DTYPES, Function, Node
from tests.corpus.rmaracebench.program import InexpressibleError, Pointer, Unit, World
from tests.corpus.rmaracebench.shmem import CONSTANTS, Calls, Number


@dataclass(eq=False)
class Variable:
    """A variable whose values are known. `memory` also has them, if its address is taken."""

    value: Any = None
    memory: Pointer | None = None


@dataclass(frozen=True)
class Load:
    """A value that is read from memory when it is used."""

    text: str

    def __str__(self) -> str:
        return self.text


class _Returned(Exception):
    def __init__(self, value: Any):
        self.value = value


@dataclass(eq=False)
class Region:
    """A parallel region: its number, and how often each of its threads has come to a barrier."""

    number: int
    threads: int
    barriers: dict[int, int] = field(default_factory=dict)


_BINARY = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv,
}  # fmt: skip


@dataclass(eq=False)
class Thread:
    """A thread of a PE.

    Attributes:
        addressed: names of variables whose addresses the program takes.
        scopes: the variables that it sees, the innermost block last.
        number, region: which thread of which parallel region it is.
        iteration: of the parallel loop that it executes.
        tasks: flags that its tasks signal when they end.
    """

    world: World
    pe: int
    unit: Unit
    functions: dict[str, Function]
    addressed: set[str]
    scopes: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    region: Region | None = None
    iteration: int = 0
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = Calls(self.world, self.pe, self.unit, Load)

    # -- statements ----------------------------------------------------------------------------------------------------

    def run(self, node: Node) -> None:
        getattr(self, f"_{node.kind}")(node.line, *node.parts)

    def _block(self, line: int, statements: list[Node], is_scope: bool) -> None:
        if is_scope:
            self.scopes = [*self.scopes, {}]
        for statement in statements:
            self.run(statement)
        if is_scope:
            self.scopes = self.scopes[:-1]

    def _declare(self, line: int, of: str, name: str, size: Node | None, first: Node | None) -> None:
        value = self.value(first) if first is not None else None
        if of not in DTYPES or name not in self.addressed and size is None:
            self.scopes[-1][name] = Variable(self._read(line, value))
            return
        unique = f"{name}_{line}" + (f"_{self.number}" if self.number else "")
        memory = self.world.memory(unique, DTYPES[of], self.value(size) if size is not None else 1)
        if isinstance(value, int | float):
            memory.first[self.pe] = value
        elif value is not None:
            self.unit.add(line, f"{Pointer(memory)} = {value}")
        self.scopes[-1][name] = Variable(value, Pointer(memory)) if isinstance(value, Number) else Pointer(memory)

    def _if(self, line: int, condition: Node, yes: Node, no: Node | None) -> None:
        if chosen := yes if self._known(condition) else no:
            self.run(chosen)

    def _for(self, line: int, first: Node, condition: Node, step: Node, body: Node) -> None:
        for _ in self._turns(first, condition, step):
            self.run(body)

    def _turns(self, first: Node, condition: Node, step: Node) -> Iterator[int]:
        self.scopes = [*self.scopes, {}]
        self.run(first)
        number = 0
        while self._known(condition):
            yield number
            self.value(step)
            number += 1
        self.scopes = self.scopes[:-1]

    def _while(self, line: int, condition: Node, body: Node) -> None:
        self._poll(line, self.value(condition))

    def _do(self, line: int, condition: Node, body: Node) -> None:
        self.run(body)
        self._poll(line, self.value(condition))

    def _poll(self, line: int, condition: Any) -> None:
        if not isinstance(condition, Load):
            raise InexpressibleError(f"line {line}: a loop that does not poll")
        self.unit.add(line, f"while {condition}:", "    pass")

    def _return(self, line: int, value: Node) -> None:
        raise _Returned(self.value(value))

    def _evaluate(self, line: int, expression: Node) -> None:
        self.value(expression)

    def _known(self, condition: Node) -> bool:
        found = self.value(condition)
        if isinstance(found, Load):
            raise InexpressibleError(f"line {condition.line}: a branch that depends on memory")
        return bool(found)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: Node) -> Any:
        """The value of an expression."""
        match node.kind, node.parts:
            case "number", (text,):
                return float(text) if "." in text else int(text)
            case "string", (text,):
                return text
            case "name" | "element" | "pointed", _:
                place = self._place(node)
                return place.value if isinstance(place, Variable) else Load(str(place))
            case "address", (_, of):
                place = self._place(of)
                return place.memory or place if isinstance(place, Variable) else place
            case "cast", (of, inner):
                found = self.value(inner)
                return found.cast(DTYPES[of.rstrip("*")]) if isinstance(found, Pointer) else found
            case "unary", (sign, inner):
                return -self.value(inner) if sign == "-" else not self.value(inner)
            case "binary", (sign, left, right):
                return self._binary(sign, self.value(left), self.value(right))
            case "assign", (target, source):
                return self._store(node.line, target, self.value(source))
            case "increment", (target,):
                return self._store(node.line, target, self._binary("+", self.value(target), 1))
            case "call", (function, arguments):
                return self._call(node.line, function, arguments)
        raise InexpressibleError(f"line {node.line}: {node.kind}")

    def _place(self, node: Node) -> Any:
        """Resolve a name, an element or a pointer: to a variable with a known value, memory, or a constant."""
        match node.kind, node.parts:
            case "name", (name,):
                scope = next((scope for scope in reversed(self.scopes) if name in scope), None)
                return scope[name] if scope is not None else Variable(self.functions.get(name, CONSTANTS.get(name)))
            case "element", (array, index):
                return replace(self._place(array), offset=self.value(index))
            case "pointed", (_, pointer):
                return self.value(pointer)
        raise InexpressibleError(f"line {node.line}: {node.kind} is assigned to")

    def _binary(self, sign: str, left: Any, right: Any) -> Any:
        if isinstance(left, Load) or isinstance(right, Load):
            return Load(f"{left} {sign} {right}")
        return _BINARY[sign](left, right)

    def _store(self, line: int, target: Node, value: Any) -> Any:
        place = self._place(target)
        if isinstance(place, Variable):
            place.value = self._read(line, value)
        else:
            self.unit.add(line, f"{place} = {value}")
        return value

    def _read(self, line: int, value: Any) -> Any:
        """Current value; that of an atomic load, for which a loop may wait, stays an expression."""
        if not isinstance(value, Load) or value.text.startswith("T.atomic_load"):
            return value
        stage = self.world.stage("int64", 1)
        self.unit.add(line, f"{stage} = {value}")
        return Load(str(stage))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, line: int, function: Node, arguments: list[Node]) -> Any:
        while function.kind == "pointed":
            function = function.parts[1]
        called, name = self.value(function), function.parts[0]
        values = [self.value(argument) for argument in arguments]
        if isinstance(called, Function):
            return self._enter(called, values)
        if name == "printf":
            for value in values:
                if isinstance(value, Load):
                    self.unit.add(line, f"{self.world.tile('int64', 1)}[0] = {value}")
        elif name == "memcpy":
            values[0].value = values[1].value
        elif name.startswith("shmem_"):
            return self.calls.call(line, name.removeprefix("shmem_"), values)
        elif name not in ("sleep", "usleep", "sizeof"):
            raise InexpressibleError(f"line {line}: {name}")
        return None

    def _enter(self, function: Function, values: list[Any]) -> Any:
        before, self.scopes = self.scopes, [dict(zip(function.parameters, map(Variable, values), strict=True))]
        try:
            self.run(function.body)
        except _Returned as returned:
            return returned.value
        finally:
            self.scopes = before
        return None

    # -- OpenMP --------------------------------------------------------------------------------------------------------

    def _omp(self, line: int, words: list[str], body: Node | None) -> None:
        kind = words[0].partition("(")[0]
        atomic = {"atomic": self._atomic, "parallel": self._parallel}
        if kind in atomic:
            atomic[kind](line, words, body)
        else:
            getattr(self, f"_omp_{kind}")(line, words, body)

    def _parallel(self, line: int, words: list[str], body: Node) -> None:
        threads = next(int(word.partition("(")[2].rstrip(")")) for word in words if word.startswith("num_threads"))
        self.region = Region(line, threads)
        others = [self._forked(line, number) for number in range(1, threads)]
        for thread in (self, *others):
            thread.run(body)
            thread._omp_taskwait(line)
        for thread in others:
            self._joined(line, thread)
        self.region = None

    def _forked(self, line: int, number: int) -> Thread:
        """A thread that begins now."""
        thread = replace(self, unit=self.world.unit(self.pe), number=number, tasks=[])
        begins = self.world.flag()
        self.unit.add(line, f"T.signal({begins})")
        thread.unit.add(line, f'T.wait({begins}, ">=", 1)')
        return thread

    def _ended(self, line: int) -> str:
        """The flag that a thread signals now, as it ends."""
        ends = self.world.flag()
        self.unit.add(line, f"T.signal({ends})")
        return ends

    def _joined(self, line: int, thread: Thread) -> None:
        self.unit.add(line, f'T.wait({thread._ended(line)}, ">=", 1)')
        self.calls.inherit(thread.calls)

    def _omp_barrier(self, line: int, words: list[str], body: None) -> None:
        time = self.region.barriers[self.number] = self.region.barriers.get(self.number, 0) + 1
        flag = self.world.flag(("barrier", self.pe, self.region.number, time))
        self.unit.add(line, f"T.signal({flag})", f'T.wait({flag}, ">=", {self.region.threads})')

    def _shared(self, line: int, words: list[str]) -> None:
        """The end of work that the threads of a region have shared."""
        if "nowait" not in words:
            self._omp_barrier(line, words, None)

    def _omp_master(self, line: int, words: list[str], body: Node) -> None:
        if self.number == 0:
            self.run(body)

    def _omp_single(self, line: int, words: list[str], body: Node) -> None:
        self._omp_master(line, words, body)
        self._shared(line, words)

    def _omp_for(self, line: int, words: list[str], body: Node) -> None:
        *head, inner = body.parts
        for number in self._turns(*head):
            self.iteration = number
            if self.iteration % self.region.threads == self.number:
                self.run(inner)
        self._shared(line, words)

    def _omp_ordered(self, line: int, words: list[str], body: Node) -> None:
        flag = self.world.flag(("ordered", self.pe, line))
        self.unit.add(line, f'T.wait({flag}, ">=", {self.iteration})')
        self.run(body)
        self.unit.add(line, f"T.signal({flag})")

    def _omp_sections(self, line: int, words: list[str], body: Node) -> None:
        for number, section in enumerate(body.parts[0]):
            if number % self.region.threads == self.number:
                self.run(section.parts[1])
        self._shared(line, words)

    def _omp_task(self, line: int, words: list[str], body: Node) -> None:
        task = self._forked(line, self.region.threads + len(self.tasks))
        task.run(body)
        self.tasks.append(task._ended(line))
        self.calls.inherit(task.calls)

    def _omp_taskwait(self, line: int, words: list[str] = (), body: None = None) -> None:
        self.unit.add(line, *(f'T.wait({flag}, ">=", 1)' for flag in self.tasks))
        self.tasks.clear()

    def _atomic(self, line: int, words: list[str], body: Node) -> None:
        (expression,) = body.parts
        if "read" in words:
            target, source = expression.parts
            self._store(line, target, Load(f'T.atomic_load({self.value(source)}, memory_order="relaxed")'))
        else:
            self.unit.add(line, f"T.atomic_add({self.value(expression.parts[0])}, 1)")


def translated(functions: dict[str, Function], size: int) -> World:
    """The program of that many PEs.

    Raises:
        InexpressibleError: it does what the language has no counterpart for.
    """
    world = World(size)
    addressed = {name for function in functions.values() for name in _addressed(function.body)}
    for pe in range(size):
        thread = Thread(world, pe, world.units[pe][0], functions, addressed)
        thread._enter(functions["main"], [None] * len(functions["main"].parameters))
    return world


def _addressed(node: Any) -> Iterator[str]:
    """Names whose addresses are taken."""
    if isinstance(node, list | tuple):
        for part in node:
            yield from _addressed(part)
    elif isinstance(node, Node):
        if node.kind == "address" and node.parts[1].kind == "name":
            yield node.parts[1].parts[0]
        yield from _addressed(node.parts)
