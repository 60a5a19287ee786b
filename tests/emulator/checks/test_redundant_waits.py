# SPDX-License-Identifier: MIT
"""Waits that no access needs are reported, and no others."""

import itertools
from dataclasses import dataclass

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of, tensors
from tilescale.backends.emulator.checks.clocks import Clock
from tilescale.backends.emulator.checks.flags import Flag, Update
from tilescale.backends.emulator.checks.redundant import RedundantWaits
from tilescale.backends.emulator.checks.states import Access, State
from tilescale.backends.emulator.execute.observe import WRITE


def told(program, args, **options):
    """Lines of the waits that a run reports as redundant."""
    return {where.line for _, where in tilescale.emulate(program, args, time=False, **options).redundant_waits}


def test_a_second_wait_for_the_same_and_one_behind_a_barrier():
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", 1)
                T.wait(F[0], ">=", 1)  # again
                T.signal(F[1], dst=1 - rank)
                T.barrier()
                T.wait(F[1], ">=", 1)  # after a barrier
                T.copy(Y, X)

    report = tilescale.emulate(program, tensors(2, (8, 8), (8, 8), (2,)))
    assert {where.line for _, where in report.redundant_waits} == {line_of("again"), line_of("after a barrier")}
    again = f"redundant wait for F: no access of this run needs it  test_redundant_waits.py:{line_of('again')}"
    assert again in str(report).splitlines() and again in report._repr_html_()


def exchange(arrives, reads):
    """Neighbours signal each other after a put, and then read the data or not."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), Y: T.Tensor((8, 1), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if arrives:
                    T.copy(X, Y, dst=1 - rank)
                T.signal(F[0], dst=1 - rank)
                T.wait(F[0], ">=", 1)  # arrived
                if reads:
                    T.copy(Y, X)

    return program


def test_a_wait_is_needed_by_who_reads_and_by_the_caller():
    for arrives, reads in itertools.product((True, False), repeat=2):
        assert told(exchange(arrives, reads), tensors(2, (8, 1), (8, 1), (2,))) == (
            set() if arrives else {line_of("arrived")}
        ), (arrives, reads)


def test_a_wait_of_whoever_signals_too():
    """Device 2 looks for one signal of two. That device 0 has put is known only since device 1 waits for it."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), Y: T.Tensor((8, 1), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    T.copy(X, Y, dst=2)
                    T.signal(F[0], dst=2)
                    T.signal(F[1], dst=1)
                if rank == 1:
                    T.wait(F[1], ">=", 1)
                    T.signal(F[0], dst=2)
                if rank == 2:
                    T.wait(F[0], ">=", 1)
                    T.copy(Y, X)

    assert not told(program, tensors(3, (8, 1), (8, 1), (2,)))


def test_a_flag_that_is_set_back():
    """The order of two updates of a flag is kept by a wait, though no data is."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), G: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    T.signal(F[0], dst=1)
                if rank == 1:
                    T.wait(F[0], ">=", 1)  # kept
                    T.signal(F[0], 0, op="set")

    assert not told(program, tensors(2, (1,), (1,)))


def test_on_one_device_nothing_is_said():
    """There all is done when a device comes to a wait for its peers."""

    @T.prim_func
    def program(X: T.Tensor((8, 1), "float32"), F: T.Tensor((1,), "int32"), device: T.int32):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(F[0], dst=(rank + 1) % size)
            with T.Scale("device"):
                T.wait(F[0], ">=", 1)

    assert told(program, [[*given, 0] for given in tensors(2, (8, 1), (1,))])
    assert not told(program, [[*tensors(1, (8, 1), (1,))[0], 0]])


# -- dependencies between waits: on clocks and flags alone
# ---------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Position of a program's wait."""

    name: str
    where: None = None


class Waits(RedundantWaits):
    """Tasks that signal, wait and access an element; waits have names."""

    def __init__(self, *tasks):
        super().__init__()
        self.clocks, self.flags, self.homes = {task: Clock(task) for task in tasks}, {}, {}

    def signals(self, task, flag):
        found = self.flags.setdefault(flag, Flag(0))
        found.add(Update(found.value, found.value + 1, self.clocks[task].publish()))

    def waits(self, task, flag, count=1, name=None):
        home = self.homes.setdefault(name or flag, Place(name or flag))
        self.wait(home, self.flags[flag], self.clocks[task], lambda value: value >= count)

    def access(self, task, home=None):
        return Access(self.clocks[task], self.clocks[task].time, WRITE, self.homes.get(home), None)

    def ordered_after(self, first, second):
        self.ordered(State(write=first), second)

    @property
    def names(self):
        return [name for name, _ in self.left]


def test_a_wait_tells_of_all_rounds_and_all_tasks_that_waited():
    for written in (0, 1):
        for reader in ("a", "b"):
            waits = Waits("a", "b", "writer")
            accesses = []
            for count in (1, 2):
                accesses.append(waits.access("writer"))
                waits.signals("writer", "f")
                waits.waits("a", "f", count)
                waits.waits("b", "f", count)
            late = waits.access("writer")
            waits.ordered_after(late, waits.access(reader))
            assert waits.names == ["f"], "nobody was told of that"
            waits.ordered_after(accesses[written], waits.access("writer"))
            assert waits.names == ["f"], "a task needs nobody to know what it did"
            waits.ordered_after(accesses[written], waits.access(reader))
            assert not waits.names


def test_what_a_needed_wait_rests_on_is_needed():
    """`second` polls a flag whose signal the task has acquired by `first`; whether before or after `second` is needed.
    """
    for needed_before in (False, True):
        waits = Waits("task", "one", "two")
        put = waits.access("two")
        signal = waits.access("one")
        waits.signals("one", "f")
        waits.signals("two", "g")
        waits.waits("task", "g", name="second")
        waits.waits("task", "f", name="first")
        if needed_before:
            waits.ordered_after(put, waits.access("task"))
            assert waits.names == ["first"]
        waits.ordered_after(signal, waits.access("task", home="second"))
        if not needed_before:
            assert sorted(waits.names) == ["first", "second"]
            waits.ordered_after(put, waits.access("task"))
        assert not waits.names


def test_what_any_of_several_relays_tells():
    waits = Waits("origin", "one", "two", "end")
    put = waits.access("origin")
    waits.signals("origin", "f")
    for relay in ("one", "two"):
        waits.waits(relay, "f", name=relay)
        waits.signals(relay, "g")
    waits.waits("end", "g", name="end")
    assert sorted(waits.names) == ["end", "one", "two"]
    waits.ordered_after(put, waits.access("end"))
    assert not waits.names


def test_own_signals_and_first_values_are_passed_over():
    waits = Waits("task", "other")
    waits.signals("task", "f")
    waits.waits("task", "f", name="own")
    waits.signals("other", "f")
    waits.waits("task", "f", 0, name="none")
    assert not waits.names
    waits.waits("task", "f", 2)
    waits.rests(waits.clocks["task"], waits.clocks["other"], 1)
    assert not waits.names
