# SPDX-License-Identifier: MIT
"""Parts of the checks compared with the simplest equivalent models, on random inputs."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale.backends.emulator.checks.clocks import Clock, Place
from tilescale.backends.emulator.checks.flags import Flag, Update
from tilescale.backends.emulator.checks.shadow import Memory, Shadow
from tilescale.backends.emulator.checks.states import Access, Conflict, Table
from tilescale.backends.emulator.execute.observe import ATOMIC, ATOMIC_LOAD, READ, WRITE

quick = settings(deadline=None, max_examples=150)

# -- clocks: against reachability in the graph of events ---------------------------------------------------------------


class Graph:
    """Tasks with their clocks, and the graph of what they did: an event for every step."""

    def __init__(self):
        self.edges: list[set[int]] = []
        self.clocks, self.last, self.children = [Clock("0"), Clock("1")], [], [[], []]
        self.places = [(Place(), []) for _ in range(2)]
        self.epochs: list[tuple[Clock, int, int]] = []
        self.last = [self.event(), self.event()]

    def event(self, *before):
        self.edges.append(set(before).union(*(self.edges[b] for b in before)) if before else set())
        return len(self.edges) - 1

    def act(self, task):
        """The task executes an event that others may be ordered with."""
        self.last[task] = self.event(self.last[task])
        self.epochs.append((self.clocks[task], self.clocks[task].time, self.last[task]))

    def busy(self, task):
        return self.clocks[task].joined is not None or bool(self.children[task])

    def fork(self, task):
        for _ in range(2):
            self.clocks.append(Clock(str(len(self.clocks)), self.clocks[task]))
            self.children.append([])
            self.children[task].append(len(self.clocks) - 1)
            self.last.append(self.event(self.last[task]))

    def join(self, task):
        self.clocks[task].join([self.clocks[c] for c in self.children[task]])
        self.last[task] = self.event(self.last[task], *(self.last[c] for c in self.children[task]))
        self.children[task] = []

    def publish(self, task, number):
        place, events = self.places[number]
        self.last[task] = self.event(self.last[task])
        events.append(self.last[task])
        place.publish(self.clocks[task].publish())
        self.last[task] = self.event(self.last[task])

    def acquire(self, task, number):
        place, events = self.places[number]
        place.acquire(self.clocks[task])
        self.last[task] = self.event(self.last[task], *events)


step = st.tuples(st.sampled_from(["act", "fork", "join", "join", "publish", "acquire"]), st.integers(0, 30))


@settings(deadline=None, max_examples=400)
@given(st.lists(step, min_size=10, max_size=60))
def test_clocks_know_what_happened_before(steps):
    graph = Graph()
    for what, number in steps:
        task = number % len(graph.clocks)
        if what == "join":
            if graph.children[task] and not any(graph.busy(c) for c in graph.children[task]):
                graph.join(task)
        elif not graph.busy(task):
            getattr(graph, what)(task, *([number % 2] if what in ("publish", "acquire") else []))
    for task, clock in enumerate(graph.clocks):
        if clock.joined is None and not graph.children[task]:
            for other, time, event in graph.epochs:
                before = event == graph.last[task] or event in graph.edges[graph.last[task]]
                assert clock.knows(other, time) == before


# -- flags: against all orders in which the signals can come -----------------------------------------------------------


@quick
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.sets(st.integers(0, 3)),
)
def test_a_wait_sees_what_it_must_have_seen(signals, sums, met):
    """Tasks add to a flag, some after having seen another one's signals; waits for sums follow all of them."""
    clocks, waiter, flag = [Clock(str(i)) for i in range(4)], Clock("waiter"), Flag(0)
    updates = []
    for task, value, looks in signals:
        if looks and updates:
            clocks[task].learn({updates[-1].past.clock: updates[-1].past.time, **updates[-1].past.known})
        updates.append(Update(flag.value, flag.value + value, clocks[task].publish()))
        flag.add(updates[-1])
    for task in met:
        waiter.learn({clocks[task]: clocks[task].time - 1, **clocks[task].known})
    before = {
        u: {v for v in range(u) if updates[u].past.knows(updates[v].past.clock, updates[v].past.time)}
        for u in range(len(updates))
    }

    def seen():
        return {u for u in range(len(updates)) if waiter.knows(updates[u].past.clock, updates[u].past.time)}

    for wanted in sums:
        if wanted <= flag.value:
            known = seen()
            flag.wait(waiter, lambda value, wanted=wanted: value >= wanted)
            assert seen() == known | necessary([u.added for u in updates], before, known, wanted)


def test_a_wait_for_two_signals_learns_what_both_authors_knew():
    waiter, flag, origins = Clock("waiter"), Flag(0), [Clock("0"), Clock("1")]
    for origin in origins:
        relay = Clock("relay")
        relay.learn({origin: origin.time})
        flag.add(Update(flag.value, flag.value + 1, relay.publish()))
    flag.wait(waiter, lambda value: value >= 2)
    assert all(waiter.knows(origin, 1) for origin in origins)


def necessary(values, before, known, wanted):
    """Events in the shortest prefix that has the sum, in every order that keeps `before`, given the known facts."""
    result = set(range(len(values)))
    for order in itertools.permutations(range(len(values))):
        place = {u: i for i, u in enumerate(order)}
        if any(place[v] > place[u] for u in before for v in before[u]):
            continue
        total, prefix = 0, set()
        for u in order:
            if total >= wanted and known <= prefix:
                break
            prefix.add(u)
            total += values[u]
        result &= prefix
    return result


# -- states: against all accesses that there were ----------------------------------------------------------------------


one_access = st.tuples(
    st.integers(0, 3), st.sampled_from([READ, READ, WRITE, ATOMIC, ATOMIC_LOAD]), st.sets(st.integers(0, 3))
)


@settings(deadline=None, max_examples=400)
@given(st.lists(one_access, max_size=12))
def test_states_keep_what_can_still_race(accesses):
    """Tasks access one element, each after having seen all that some others did until then."""
    clocks, table, number, past = [Clock(str(i)) for i in range(4)], Table(), 0, []
    for task, kind, seen in accesses:
        clock = clocks[task]
        for other in seen - {task}:
            clock.learn({**clocks[other].known, clocks[other]: clocks[other].time})
            clocks[other].tick()
        access = Access(clock, clock.time, kind, None, None)
        racing = [
            a
            for a in past
            if not {a.kind, kind} <= {READ, ATOMIC_LOAD}
            and not {a.kind, kind} <= {ATOMIC, ATOMIC_LOAD}
            and not clock.knows(a.clock, a.time)
        ]
        if racing:
            with pytest.raises(Conflict) as caught:
                table.after(number, access)
            assert caught.value.other in racing and caught.value.number == number
            return
        number = table.after(number, access)
        assert table.after(number, access) == number
        past.append(access)


def test_states_that_nothing_is_in_are_forgotten():
    table, clock = Table(), Clock("0")
    table.limit = 5
    accesses = [Access(clock, 1, WRITE, None, None) for _ in range(5)]
    numbers = [table.after(0, access) for access in accesses[:4]]
    assert not table.full
    numbers += [table.after(0, access) for access in accesses[4:]]
    assert table.full
    table.keep(iter([np.array([numbers[2]])]))
    assert not table.full and table.limit == 5 and table[numbers[2]].write is not None
    again = [table.after(0, Access(clock, 1, WRITE, None, None)) for _ in range(4)]
    assert sorted(again) == sorted(set(numbers) - {numbers[2]})
    assert all(table[table.after(0, access)].write is access for access in accesses)
    table.keep(iter([np.array([1, 2, 3])]))
    assert table.limit == 8, "twice what is used, so that forgetting does not take all the time"


def test_a_state_knows_the_write_before_the_last_ones_of_a_task():
    table, (one, other), number = Table(), (Clock("0"), Clock("1")), 0
    first, second, third = (Access(clock, clock.time, WRITE, None, None) for clock in (one, other, other))
    other.learn({one: one.time})
    for access, before in (first, None), (second, first), (third, second):
        number = table.after(number, access)
        assert table[number].write is access and table[number].before is before
    one.learn({other: other.time})
    number = table.after(number, Access(one, one.time, WRITE, None, None))
    assert table[number].before is third


# -- shadow memory: against a dictionary of bytes ----------------------------------------------------------------------

TYPES = ("int8", "int16", "float32", "int64")


@st.composite
def views(draw, array):
    """A view of an array: reinterpreted, sliced, transposed."""
    view = array
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "transpose", "type", "newaxis"]))
        if kind == "slice" and view.ndim:
            index = []
            for n in view.shape:
                begin = draw(st.integers(0, n - 1))
                index.append(slice(begin, draw(st.integers(begin + 1, n)), draw(st.integers(1, 3))))
            view = view[tuple(index)]
        elif kind == "transpose":
            view = view.T
        elif kind == "newaxis" and view.ndim < 4:
            view = view[np.newaxis]
        elif view.flags.c_contiguous and view.nbytes % 8 == 0 and view.base is not None:
            view = view.reshape(-1).view(draw(st.sampled_from(TYPES)))
    return view


def bytes_of(root, view):
    """For every element of a view the offsets of its bytes, by brute force."""
    first = root.__array_interface__["data"][0]
    base = view.__array_interface__["data"][0] - first
    return {
        index: [base + sum(i * s for i, s in zip(index, view.strides, strict=True)) + b for b in range(view.itemsize)]
        for index in np.ndindex(view.shape)
    }


@quick
@given(st.data())
def test_shadow_memory(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    root = np.zeros((*shape, 8), data.draw(st.sampled_from(TYPES)))
    memory = Memory(lambda owner, given: Shadow(owner, np.int32))
    model = dict.fromkeys(range(root.nbytes), 0)
    for number in range(1, 6):
        view = data.draw(views(root))
        cells = memory.of(view).view(view)
        if view.ndim and data.draw(st.booleans()):
            taken = data.draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in view.shape)), min_size=1, max_size=4))
            index = tuple(np.array(axis) for axis in zip(*taken, strict=True))
        else:
            taken, index = list(np.ndindex(view.shape)), ()
        places = bytes_of(root, view)
        for at in taken:
            assert set(np.ravel(cells[at]).tolist()) == {model[b] for b in places[at]}
        cells[index] = number
        grain = memory.of(view).grain
        for at in taken:
            for b in places[at]:
                model.update(dict.fromkeys(range(b // grain * grain, b // grain * grain + grain), number))
        hit = np.asarray(cells[index]) == number
        inside = [set(np.unravel_index(b // root.itemsize, root.shape)[d] for at in taken for b in places[at])
                  for d in range(root.ndim)]  # fmt: skip
        assert memory.of(view).box(view, index, hit) == [(min(d), max(d) + 1) for d in inside]


def test_shadows_end_with_their_memory_and_arguments_share_theirs():
    memory = Memory(lambda owner, given: (given, owner.shape))
    tile = np.zeros((4, 4))
    assert memory.of(tile[1:]) == memory.of(tile) == (False, (4, 4))
    assert len(list(memory)) == 1
    del tile
    assert not list(memory)
    tensor = torch.zeros(4, 4)
    one, other = tensor.numpy(), tensor.numpy()
    assert memory.of(one) is memory.of(other[2:])
    assert memory.of(tensor[1:].numpy()) is not memory.of(one)
