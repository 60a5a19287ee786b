# SPDX-License-Identifier: MIT
"""The parts of the checks against models that do the same in the plainest way, on random inputs."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.backends.emulator import checks
from tilescale.backends.emulator.checks.clocks import Clock, Place
from tilescale.backends.emulator.checks.flags import Flag, Update
from tilescale.backends.emulator.checks.shadow import Memory, Shadow
from tilescale.backends.emulator.checks.states import Access, Conflict, Table
from tilescale.backends.emulator.execute.observe import ATOMIC, READ, WRITE
from tilescale.errors import RaceError

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
        """The task does something that others may be ordered with."""
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
    """What is in the shortest prefix that has the sum, in every order that keeps `before`, with what is known."""
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


one_access = st.tuples(st.integers(0, 3), st.sampled_from([READ, READ, WRITE, ATOMIC]), st.sets(st.integers(0, 3)))


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
            a for a in past if {a.kind, kind} not in ({READ}, {ATOMIC}) and not clock.knows(a.clock, a.time)
        ]  # fmt: skip
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


# -- whole programs: against a search for two accesses that no path orders ---------------------------------------------

DEVICES, ROWS, LENGTH = 3, 2, 6
PUT, GET, SIGNAL, WAIT, BARRIER, NOTHING = range(6)


@functools.cache
def interpreter():
    """A program that does what its table says: each device has its own puts, gets, signals, waits and barriers."""

    @T.prim_func
    def program(
        Ops: T.Tensor((LENGTH, 3), "int32"),
        Y: T.Tensor((ROWS, 4), "float32"),
        F: T.Tensor((DEVICES,), "int32"),
    ):
        with T.Kernel(device=DEVICES, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.clear(tile)
                with T.Scale("device") as (rank, _):
                    for step in T.serial(LENGTH):
                        if Ops[step, 0] == PUT:
                            T.copy(tile, Y[Ops[step, 2], 0], dst=Ops[step, 1])
                        if Ops[step, 0] == GET:
                            T.copy(Y[Ops[step, 2], 0], tile, src=Ops[step, 1])
                        if Ops[step, 0] == SIGNAL:
                            T.signal(F[rank], dst=Ops[step, 1])
                        if Ops[step, 0] == WAIT:
                            if rank == 0:
                                T.wait(F[Ops[step, 1]], ">=", Ops[step, 2])  # wait of device 0
                            if rank == 1:
                                T.wait(F[Ops[step, 1]], ">=", Ops[step, 2])  # wait of device 1
                            if rank == 2:
                                T.wait(F[Ops[step, 1]], ">=", Ops[step, 2])  # wait of device 2
                        if Ops[step, 0] == BARRIER:
                            T.barrier()

    return program


class Model:
    """The same table, run step by step; what waits for ever is left out of it, from there on.

    Attributes:
        table: what runs.
        after: event -> all events that some path leads from.
        places: event -> the device, row and whether it is a write, for those that are accesses.
    """

    def __init__(self, table):
        self.table = [list(ops) for ops in table]
        self.after, self.places = {}, {}
        self._position, self._previous = [0] * DEVICES, [[] for _ in range(DEVICES)]
        self._signals = {pair: [] for pair in itertools.product(range(DEVICES), repeat=2)}
        while any(p < LENGTH for p in self._position):
            if not any([self._step(device) for device in range(DEVICES)]):
                stuck = next(d for d in range(DEVICES) if self._position[d] < LENGTH)
                self.table[stuck][self._position[stuck] :] = [(NOTHING, 0, 0)] * (LENGTH - self._position[stuck])

    def _step(self, device):
        if self._position[device] == LENGTH:
            return False
        what, peer, number = self._next(device)
        before = list(self._previous[device])
        if what == BARRIER:
            if not all(self._position[d] < LENGTH and self._next(d)[0] == BARRIER for d in range(DEVICES)):
                return False
            before = [event for previous in self._previous for event in previous]
            for other in range(DEVICES):
                self._record(other, before)
            return True
        if what == WAIT:
            if len(self._signals[peer, device]) < number:
                return False
            before += self._signals[peer, device][:number]
        event = self._record(device, before)
        if what == SIGNAL:
            self._signals[device, peer].append(event)
        if what in (PUT, GET):
            self.places[event] = peer, number, what == PUT
        return True

    def _next(self, device):
        return self.table[device][self._position[device]]

    def _record(self, device, before):
        event = device, self._position[device]
        self.after[event] = set(before).union(*(self.after[b] for b in before))
        self._previous[device] = [event]
        self._position[device] += 1
        return event

    @property
    def races(self):
        """Whether no path leads from one of two accesses to the other."""
        return any(
            one[0] != other[0] and a[:2] == b[:2] and (a[2] or b[2])
            and one not in self.after[other] and other not in self.after[one]
            for (one, a), (other, b) in itertools.combinations(self.places.items(), 2)
        )  # fmt: skip


def arguments(model):
    """For each device its table, its rows and its flags."""
    tables = [torch.tensor(ops, dtype=torch.int32) for ops in model.table]
    return [[ops, torch.zeros(ROWS, 4), torch.zeros(DEVICES, dtype=torch.int32)] for ops in tables]


operations = st.one_of(
    st.tuples(st.sampled_from([PUT, GET, GET, SIGNAL]), st.integers(0, DEVICES - 1), st.integers(0, ROWS - 1)),
    st.tuples(st.just(WAIT), st.integers(0, DEVICES - 1), st.integers(1, 2)),
    st.tuples(st.sampled_from([BARRIER, NOTHING]), st.just(0), st.just(0)),
)

tables = st.lists(st.lists(operations, min_size=LENGTH, max_size=LENGTH), min_size=DEVICES, max_size=DEVICES)


@settings(deadline=None, max_examples=100)
@given(tables, st.data())
def test_programs_race_if_and_only_if_two_accesses_have_no_order(table, data):
    model = Model(table)
    seed = data.draw(st.sampled_from([None, 0, 1, 2, 3]))
    few = data.draw(st.booleans())  # states are forgotten all the time
    args = arguments(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.states, "MOST", 1 if few else checks.states.MOST)
        with pytest.raises(RaceError) if model.races else contextlib.nullcontext():
            report = tilescale.emulate(interpreter(), args, schedule_seed=seed)
            assert not without_waits(model.table, redundant(report)).races


def redundant(report):
    """The devices whose waits are said to be redundant."""
    lines = {where.line for _, where in report.redundant_waits}
    return {device for device in range(DEVICES) if line_of(f"wait of device {device}") in lines}


def without_waits(table, devices):
    """The model in which some devices do not wait."""
    return Model(
        [(NOTHING, 0, 0) if ops[0] == WAIT and device in devices else ops for ops in row]
        for device, row in enumerate(table)
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # Device 1 tells device 2 of what device 0 has put there.
        ([[(PUT, 2, 0), (SIGNAL, 1, 0)], [(WAIT, 0, 1), (SIGNAL, 2, 0)], [(WAIT, 1, 1), (GET, 2, 0)]], set()),
        # Device 0 does so too, and first.
        (
            [
                [(PUT, 2, 0), (SIGNAL, 1, 0), (SIGNAL, 2, 0)],
                [(WAIT, 0, 1), (SIGNAL, 2, 0)],
                [(WAIT, 0, 1), (GET, 2, 0)],
            ],
            {1},
        ),
        # What device 0 puts after its signal has been read before; what it gets has been its own.
        ([[(GET, 0, 0), (SIGNAL, 1, 0)], [(WAIT, 0, 1), (PUT, 0, 0)], []], set()),
        ([[(GET, 0, 0), (SIGNAL, 1, 0)], [(WAIT, 0, 1), (PUT, 0, 1)], []], {1}),
        # A barrier says all that a wait behind it could, but not what one before it has said.
        ([[(PUT, 1, 0), (SIGNAL, 1, 0), (BARRIER, 0, 0)], [(BARRIER, 0, 0), (WAIT, 0, 1), (GET, 1, 0)],
          [(BARRIER, 0, 0)]], {1}),
        ([[(PUT, 1, 0), (SIGNAL, 1, 0), (BARRIER, 0, 0)], [(WAIT, 0, 1), (GET, 1, 0), (BARRIER, 0, 0)],
          [(BARRIER, 0, 0)]], set()),
        # A value that was there from the beginning, and a signal of one's own.
        ([[(SIGNAL, 1, 0), (SIGNAL, 0, 0), (WAIT, 0, 1)], [(WAIT, 0, 0)], []], set()),
    ],
)  # fmt: skip
def test_waits_that_no_access_needs(table, expected):
    model = Model([[*row, *[(NOTHING, 0, 0)] * (LENGTH - len(row))] for row in table])
    assert not model.races
    assert redundant(tilescale.emulate(interpreter(), arguments(model))) == expected
