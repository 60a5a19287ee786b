# SPDX-License-Identifier: MIT
"""Calls of OpenSHMEM as statements of TileScale.

A put, a get or an atomic operation is an asynchronous unit, which begins at the call; `shmem_quiet` waits for its end.
A blocking put copies its source first, a blocking get is waited for immediately. After `shmem_fence` puts and atomic
updates begin when those before it, to the same PE, have ended.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.corpus.rmaracebench.program import InexpressibleError, Pointer, Unit, World


class Number(int):
    """A PE's number, or how many there are."""


@dataclass(frozen=True, eq=False)
class Context:
    """A context of operations; `narrow` if only PEs that share memory have it."""

    narrow: bool = False


DEFAULT = Context()

CONSTANTS = {
    "SHMEM_TEAM_WORLD": "world", "SHMEM_TEAM_SHARED": "shared", "SHMEM_TEAM_INVALID": None, "NULL": None,
    "SHMEM_SIGNAL_SET": "set", "SHMEM_SIGNAL_ADD": "add", "SHMEM_CMP_EQ": "==", "SHMEM_CMP_NE": "!=",
    "SHMEM_CMP_GT": ">", "SHMEM_CMP_GE": ">=", "SHMEM_CMP_LT": "<", "SHMEM_CMP_LE": "<=",
}  # fmt: skip

_TYPED = re.compile(r"(ctx_)?(?:(?:int|long|float|double|uint64)_)?(\w+)")


@dataclass(frozen=True)
class Operation:
    """An operation under way: the flag at its origin that it signals when it ends, and the PE that it writes to."""

    done: str
    target: int | None


class Calls:
    """The calls of one thread."""

    def __init__(self, world: World, pe: int, unit: Unit, load: Callable[[str], Any]):
        self._world, self._pe, self._unit, self._load = world, pe, unit, load
        self._pending: dict[Context, list[Operation]] = defaultdict(list)
        self._fenced: dict[Context, list[Operation]] = defaultdict(list)
        self._line, self._context = 0, DEFAULT

    def call(self, line: int, name: str, values: list[Any]) -> Any:
        """Make a call; `name` is without `shmem_`."""
        self._line, self._context = line, DEFAULT
        if not hasattr(self, name):
            context, name = _TYPED.fullmatch(name).groups()
            self._context = values.pop(0) if context else DEFAULT
        if not hasattr(self, name):
            raise InexpressibleError(f"line {line}: shmem_{name}")
        return getattr(self, name)(*values)

    def inherit(self, other: Calls) -> None:
        """Wait here for operations that another thread has started."""
        for context, operations in other._pending.items():
            self._pending[context] += operations

    def _add(self, *texts: Any) -> None:
        self._unit.add(self._line, *texts)

    # -- PEs, teams, contexts ------------------------------------------------------------------------------------------

    def init(self) -> None: ...

    def finalize(self) -> None: ...

    def my_pe(self) -> Number:
        return Number(self._pe)

    def n_pes(self) -> Number:
        return Number(self._world.size)

    def team_split_strided(self, parent: str, first: int, stride: int, size: int, _: Any, __: int, team: Any) -> None:
        members = tuple(range(first, first + stride * size, stride))
        team.value = members if self._pe in members else None

    def team_translate_pe(self, team: str, pe: int, other: str) -> int:
        return pe

    def team_create_ctx(self, team: str, options: int, context: Any) -> None:
        context.value = Context(narrow=team == "shared")

    def team_destroy(self, team: str) -> None: ...

    def ctx_create(self, options: int, context: Any) -> None:
        context.value = Context()

    def destroy(self) -> None:
        """The end of a context completes its operations."""
        self.quiet()

    # -- order ---------------------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        for operation in self._pending.pop(self._context, ()):
            self._wait(operation)
        self._fenced.pop(self._context, None)

    def fence(self) -> None:
        self._fenced[self._context] = [o for o in self._pending[self._context] if o.target is not None]

    def barrier_all(self) -> None:
        for context in list(self._pending):
            self._context = context
            self.quiet()
        self.sync_all()

    def sync_all(self) -> None:
        self._add(self._world.sync(self._pe, tuple(range(self._world.size))))

    def sync(self, team: str) -> None:
        self.sync_all()

    def team_sync(self, team: tuple[int, ...]) -> None:
        self._add(self._world.sync(self._pe, team))

    def wait_until(self, flag: Pointer, compare: str, value: int) -> None:
        self._add(f'T.wait({flag}, "{compare}", {value})')

    def signal_fetch(self, flag: Pointer) -> Any:
        return self._load(f"T.atomic_load({flag})")

    def set_lock(self, lock: Pointer) -> None:
        """Draw a ticket at PE 0, and wait until the ticket before it is given back."""
        turns = self._world.memory("turns", "int32", self._world.size * 4)
        self._add(f"ticket = T.atomic_add({lock}, 1, dst=0, return_prev=True)")
        self._add(f'T.wait({turns.name}[ticket], ">=", T.min(ticket, 1))')

    def clear_lock(self, lock: Pointer) -> None:
        self.quiet()
        self._add(*(f"T.signal(turns[ticket + 1], dst={pe})" for pe in range(self._world.size)))

    # -- operations ----------------------------------------------------------------------------------------------------

    def _begin(self, *texts: str, at: int | None = None, target: int | None = None) -> Operation:
        """An operation begins as a unit of its own, `at` a PE. `target` is where it writes, if fences order it."""
        unit = self._world.unit(self._pe if at is None else at)
        begins, done = self._world.flag(), self._world.flag()
        self._add(f"T.signal({begins}, dst={unit.pe})")
        unit.add(self._line, f'T.wait({begins}, ">=", 1)')
        for before in self._fenced[self._context]:
            if target is not None and before.target == target:
                unit.add(self._line, f'T.wait({before.done}, ">=", 1)')
        unit.add(self._line, *texts, f"T.signal({done}, dst={self._pe})")
        operation = Operation(done, target)
        self._pending[self._context].append(operation)
        return operation

    def _wait(self, operation: Operation) -> None:
        self._add(f'T.wait({operation.done}, ">=", 1)')

    def _staged(self, source: Pointer, count: int) -> Pointer:
        """A copy of the source that is made now."""
        stage, tile = self._world.stage(source.of, count), self._world.tile(source.of, count)
        self._add(f"T.copy({source.region(count)}, {tile})", f"T.copy({tile}, {stage.region(count)})")
        return stage

    def put_nbi(self, target: Pointer, source: Pointer, count: int, pe: int, told: str = "") -> None:
        tile = self._world.tile(source.of, count)
        self._begin(
            f"T.copy({source.region(count)}, {tile})",
            f"T.copy({tile}, {target.region(count)}, dst={pe}{told})",
            target=pe,
        )

    def put(self, target: Pointer, source: Pointer, count: int, pe: int) -> None:
        self.put_nbi(target, self._staged(source, count), count, pe)

    def iput(self, target: Pointer, source: Pointer, to: int, step: int, count: int, pe: int) -> None:
        self._check_one(count)
        self.put(target, source, count, pe)

    def p(self, target: Pointer, value: int, pe: int) -> None:
        stage = self._world.stage(target.of, 1)
        self._add(f"{stage} = {value}")
        self.put_nbi(target, stage, 1, pe)

    def put_signal_nbi(
        self, target: Pointer, source: Pointer, count: int, flag: Pointer, value: int, op: str, pe: int
    ) -> None:
        self.put_nbi(target, source, count, pe, f', signal={flag}, value={value}, op="{op}"')

    def put_signal(
        self, target: Pointer, source: Pointer, count: int, flag: Pointer, value: int, op: str, pe: int
    ) -> None:
        self.put_signal_nbi(target, self._staged(source, count), count, flag, value, op, pe)

    def get_nbi(self, target: Pointer, source: Pointer, count: int, pe: int) -> Operation:
        tile = self._world.tile(source.of, count)
        return self._begin(
            f"T.copy({source.region(count)}, {tile}, src={pe})", f"T.copy({tile}, {target.region(count)})"
        )

    def get(self, target: Pointer, source: Pointer, count: int, pe: int) -> None:
        self._wait(self.get_nbi(target, source, count, pe))

    def iget(self, target: Pointer, source: Pointer, to: int, step: int, count: int, pe: int) -> None:
        self._check_one(count)
        self.get(target, source, count, pe)

    def g(self, source: Pointer, pe: int) -> Any:
        return self._fetched(source, lambda stage: self.get_nbi(stage, source, 1, pe))

    def _check_one(self, count: int) -> None:
        if count != 1:
            raise InexpressibleError(f"line {self._line}: elements that lie apart")

    def _fetched(self, source: Pointer, begin: Callable[[Pointer], Operation]) -> Any:
        """Result of an operation, after it has ended."""
        stage = self._world.stage(source.of, 1)
        self._wait(begin(stage))
        return self._load(str(stage))

    # -- atomic operations ---------------------------------------------------------------------------------------------

    def atomic_set(self, target: Pointer, value: int, pe: int) -> None:
        if "float" in target.of:
            raise InexpressibleError("no atomic store of a float at a peer")
        self._begin(f'T.signal({target}, {value}, op="set", dst={pe})', target=pe)

    def atomic_add(self, target: Pointer, value: int, pe: int) -> None:
        if self._context.narrow:
            self._begin(f"T.atomic_add({target}, {value})", at=pe, target=pe)
        else:
            self._begin(f"T.atomic_add({target}, {value}, dst={pe})", target=pe)

    def atomic_inc(self, target: Pointer, pe: int) -> None:
        self.atomic_add(target, 1, pe)

    def atomic_fetch_nbi(self, result: Pointer, source: Pointer, pe: int) -> Operation:
        tile = self._world.tile(source.of, 1)
        return self._begin(
            f'{tile}[0] = T.atomic_load({source}, memory_order="relaxed")',
            f"T.copy({tile}, {result.region(1)}, dst={self._pe})",
            at=pe,
        )

    def atomic_fetch(self, source: Pointer, pe: int) -> Any:
        return self._fetched(source, lambda stage: self.atomic_fetch_nbi(stage, source, pe))

    def atomic_fetch_inc_nbi(self, result: Pointer, source: Pointer, pe: int) -> Operation:
        tile = self._world.tile(source.of, 1)
        return self._begin(
            f"{tile}[0] = T.atomic_add({source}, 1, dst={pe}, return_prev=True)",
            f"T.copy({tile}, {result.region(1)})",
        )

    def atomic_fetch_inc(self, source: Pointer, pe: int) -> Any:
        return self._fetched(source, lambda stage: self.atomic_fetch_inc_nbi(stage, source, pe))

    def atomic_compare_swap_nbi(self, result: Pointer, source: Pointer, _: int, __: int, pe: int) -> Operation:
        """By a fetch-add: an atomic read and write that returns what was there, as this one is."""
        return self.atomic_fetch_inc_nbi(result, source, pe)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def sum_reduce(self, team: str, target: Pointer, source: Pointer, count: int) -> None:
        """Each PE sends its part to all, and adds up what has come. It does not wait for what the others do then."""
        self._check_one(count)
        inbox = self._world.memory(f"inbox_{self._line}", source.of, self._world.size)
        flag, tile = self._world.flag(("reduce", self._line)), self._world.tile(source.of, 1)
        self._add(f"T.copy({source.region(1)}, {tile})")
        for pe in range(self._world.size):
            self._add(f"T.copy({tile}, {Pointer(inbox, self._pe).region(1)}, dst={pe}, signal={flag})")
        self._add(f'T.wait({flag}, ">=", {self._world.size})')
        self._add(f"{target} = " + " + ".join(str(Pointer(inbox, pe)) for pe in range(self._world.size)))
