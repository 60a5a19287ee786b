# SPDX-License-Identifier: MIT
"""Races and redundant waits of random programs, against a search for two accesses that no path orders."""

import contextlib
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.backends.emulator import checks
from tilescale.errors import RaceError

DEVICES, ROWS, LENGTH = 3, 2, 6
PUT, GET, SIGNAL, WAIT, BARRIER, NOTHING = range(6)


@functools.cache
def interpreter():
    """A program by a table: puts, gets, signals, waits and barriers of each device."""

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
    """Devices whose waits are reported as redundant."""
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
        # Device 1 signals device 2 for what device 0 has put there.
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
        # Data that device 0 puts after its signal has been read before; data that it gets is its own.
        ([[(GET, 0, 0), (SIGNAL, 1, 0)], [(WAIT, 0, 1), (PUT, 0, 0)], []], set()),
        ([[(GET, 0, 0), (SIGNAL, 1, 0)], [(WAIT, 0, 1), (PUT, 0, 1)], []], {1}),
        # A barrier covers a wait after it, but not a wait before it.
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
