# SPDX-License-Identifier: MIT
"""Candidates for a remedy: units whose signals answer a race, and expressions that fit a flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tilelang_core import ir
from tilescale.backends.emulator import remedies
from tilescale.backends.emulator.checks.states import Access
from tilescale.backends.emulator.edits import Place
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.program.operations import Copy

RANK, SIZE, OTHER = (ir.Var(name, "int32") for name in ("rank", "size", "other"))
PROGRAM = ir.Var("bx", "int32")


def loop(extent: Any, begin: int = 0) -> Any:
    variable = ir.Var("r", "int32")
    extent = ir.int_node(extent) if isinstance(extent, int) else extent
    return SimpleNamespace(loop_var=variable, min=ir.int_node(begin), extent=extent)


def said(terms: Sequence[Any]) -> list[str]:
    return [text for text, _ in terms]


# -- values of a flag --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loops", "values", "expected"),
    [
        ([loop(6)], [1, 2, 3, 4, 5, 6], ["r - 3", "r - 2", "r - 1", "r", "r + 1", "1", "2", "3", "5", "6"]),
        ([loop(3)], [2, 4, 6], ["2 * (r - 3)", "2 * (r - 2)", "2 * (r - 1)", "2 * (r)", "2 * (r + 1)", "2", "4", "6"]),
        ([loop(2, begin=2)], [1, 2], ["r - 5", "r - 4", "r - 3", "r - 2", "r - 1", "1", "2"]),
        ([loop(3)], [1, 2], ["1", "2"]),  # not a number of signals an iteration
        ([loop(1)], [1, 2], ["1", "2"]),
        ([loop(SIZE)], [1, 2], ["1", "2"]),
        ([], [0, 2, 2], ["2"]),  # every flag is at least zero
    ],
)
def test_a_flag_rises_with_a_loop_or_has_a_number(loops: list[Any], values: list[int], expected: list[str]):
    assert said(remedies._values(Place(loops=tuple(loops)), values)) == expected


def test_a_value_of_a_turn_is_what_its_text_says():
    around = loop(3)
    found = dict(remedies._values(Place(loops=(around,)), [2, 4, 6]))
    assert [ir.constant(ir.substitute(found["2 * (r - 3)"], {around.loop_var: ir.int_node(r)})) for r in (0, 5)] == [
        -6,
        4,
    ]


# -- indices and peers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Stands for a unit: its ranks at levels, how many there are of each, and its program."""

    ranks: dict[str, int]
    siblings: int = 4
    program: tuple[int, ...] = (0,)

    def find(self, level: str) -> Any:
        return SimpleNamespace(rank=self.ranks[level], siblings=self.siblings) if level in self.ranks else None

    around = find

    @property
    def place_in_grid(self) -> tuple[int, ...]:
        return self.program

    def path(self) -> list[tuple[str, int]]:
        return list(self.ranks.items())

    def __hash__(self) -> int:
        return id(self)


DEVICES = [Unit({"device": rank}) for rank in range(3)]
AT = Place(names=(OTHER, RANK), ranks=((RANK, "device"),), level="device")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2, 2, 2], ["2"]),
        ([0, 1, 2], ["rank"]),
        ([1, 2, 3], ["(rank + 1) % 4"]),
        ([3, 0, 1], ["(rank + 3) % 4"]),
        ([2, 0, 1], ["other"]),  # another integer, as no expression fits
    ],
)
def test_an_index_is_a_number_a_rank_or_another_integer(values: list[int], expected: list[str]):
    assert said(remedies._fits(values, DEVICES, AT)) == expected


def test_a_rank_further_on_is_what_its_text_says():
    ((_, made),) = remedies._fits([1, 2, 3], DEVICES, AT)
    assert ir.constant(ir.substitute(made, {RANK: ir.int_node(3)})) == 0
    assert ir.constant(ir.substitute(made, {RANK: ir.int_node(0)})) == 1


def test_an_exact_rank_comes_first():
    both = Place(names=(OTHER, RANK), ranks=((RANK, "device"), (OTHER, "block")))
    units = [Unit({"device": rank, "block": rank - 1}) for rank in (1, 2)]
    assert said(remedies._fits([1, 2], units, both)) == ["rank", "(other + 1) % 4"]


def test_there_are_as_many_as_where_there_are_most():
    units = [Unit({"device": 0}, siblings=2), Unit({"device": 1}, siblings=5)]
    assert said(remedies._fits([1, 2], units, AT)) == ["(rank + 1) % 5"]


def test_a_level_that_one_unit_is_not_in_tells_nothing():
    assert said(remedies._fits([0, 1], [Unit({"device": 0}), Unit({})], AT)) == ["rank", "other"]


def grid(extent: Any = 8) -> Place:
    extent = ir.int_node(extent) if isinstance(extent, int) else extent
    return Place(names=(OTHER,), grid=((PROGRAM, ir.int_node(4), "bx"), (SIZE, extent, "by")))


@pytest.mark.parametrize(
    ("programs", "extent", "values", "expected"),
    [
        ([(1, 0), (3, 0)], 8, [1, 3], ["bx"]),
        ([(0, 1), (0, 3)], 8, [2, 4], ["(by + 1) % 8"]),
        ([(0, 1), (0, 3)], OTHER, [1, 3], ["other"]),  # flags indexed by an argument have no second index
        ([(0,), (0,)], 8, [1, 3], ["other"]),  # they have no second index
        ([(0, 1), (0,)], 8, [1, 3], ["other"]),
    ],
)
def test_numbers_of_programs_tell_units_apart(programs: list[Any], extent: Any, values: list[int], expected: list[str]):
    assert said(remedies._fits(values, [Unit({}, program=each) for each in programs], grid(extent))) == expected


class Told:
    """Stands for a witness: tensors belong to the devices."""

    def __init__(self, *, races: Sequence[Any] = (), sent: Sequence[Any] = ()):
        self.races, self.sent = races, sent

    def number(self, unit: Any) -> int:
        return unit.ranks["device"]


def peers(place: Place, *pairs: tuple[Any, Any]) -> Any:
    return remedies._peers(Told(), place, [(unit, SimpleNamespace(unit=waits)) for unit, waits in pairs])


def test_a_flag_of_the_unit_itself_has_no_peer():
    assert peers(AT, (DEVICES[1], DEVICES[1])) == [None]


def test_a_peer_is_told_by_the_ranks_of_the_level_around():
    pairs = [(DEVICES[rank], DEVICES[(rank + 1) % 3]) for rank in range(2)]
    assert said(peers(AT, *pairs)) == ["(rank + 1) % 4"]
    assert peers(Place(names=AT.names, ranks=AT.ranks, level="block"), *pairs) == []
    assert peers(AT, *pairs, (DEVICES[2], DEVICES[2])) == [], "some have a flag of their own"


@pytest.mark.parametrize(("level", "expected"), [("device", ["other", "(rank + 1) % 4"]), ("node", ["(rank + 1) % 4"])])
def test_where_a_copy_goes_a_signal_may_go(level: str, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    made = object.__new__(Copy)
    for name, value in (("peer", OTHER), ("level", level)):
        object.__setattr__(made, name, value)
    monkeypatch.setattr(remedies, "operation", lambda value: made)
    place = Place(ir.Evaluate(ir.int_node(0)), names=AT.names, ranks=AT.ranks, level="device")
    pairs = [(DEVICES[rank], DEVICES[rank + 1]) for rank in range(2)]
    assert said(peers(place, *pairs)) == expected


def test_another_operation_names_no_peer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remedies, "operation", lambda value: SimpleNamespace(peer=OTHER, level="device"))
    place = Place(ir.Evaluate(ir.int_node(0)), names=AT.names, ranks=AT.ranks, level="device")
    assert said(peers(place, (DEVICES[0], DEVICES[1]), (DEVICES[1], DEVICES[2]))) == ["(rank + 1) % 4"]


# -- answering units
# -----------------------------------------------------------------------------------------------------


def access(unit: Any, line: Any) -> Access:
    clock, home = f"clock {line}", SimpleNamespace(where=line)
    return Access(clock, 1, "", home, unit)  # type: ignore[arg-type]


def sent(unit: Unit, holder: int, line: str, *knows: Any) -> Any:
    """A signal to a device's flag by a unit that has acquired some accesses and signals."""
    known = {each.clock if hasattr(each, "clock") else each.past.clock for each in knows}
    past = SimpleNamespace(clock=f"clock {line}", time=1, knows=lambda clock, time: clock in known)
    return SimpleNamespace(unit=unit, holder=holder, past=past, home=SimpleNamespace(where=line))


def asked(monkeypatch: pytest.MonkeyPatch, told: Told, early: Any, late: Any) -> list[tuple[Any, list[Any]]]:
    """Before which lines waits are tried, and for which signals by which units."""
    found: list[tuple[Any, list[Any]]] = []

    def waits_before(func: Any, witness: Any, where: Any, answers: Sequence[Any]) -> list[Any]:
        found.append((where, [(answer.sent.home.where, answer.unit) for answer in answers]))
        return []

    monkeypatch.setattr(remedies, "_waits_before", waits_before)
    list(remedies._waits(None, told, early, late))
    return found


ONE, PASSES, LAST = DEVICES
WRITES, READS = access(ONE, "writes"), access(LAST, "reads")
RACE = SimpleNamespace(first=WRITES, second=READS)


def test_a_signal_that_knows_of_the_early_access_answers(monkeypatch: pytest.MonkeyPatch):
    right = sent(ONE, 2, "signals", WRITES)
    others = [
        sent(ONE, 2, "too early"),
        sent(ONE, 1, "another's flag", WRITES),
        sent(ONE, 2, "too late", WRITES, READS),
    ]
    told = Told(races=[RACE], sent=[*others, right, sent(ONE, 2, "the second", WRITES)])
    assert asked(monkeypatch, told, WRITES, READS)[0] == ("reads", [("signals", LAST)])
    swapped = Told(races=[SimpleNamespace(first=READS, second=WRITES)], sent=[right])
    assert asked(monkeypatch, swapped, WRITES, READS)[0] == ("reads", [("signals", LAST)])
    elsewhere = Told(races=[SimpleNamespace(first=WRITES, second=access(LAST, "elsewhere"))], sent=[right])
    assert asked(monkeypatch, elsewhere, WRITES, READS)[0] == ("reads", [])


def test_parts_of_one_unit_need_no_signal(monkeypatch: pytest.MonkeyPatch):
    assert asked(monkeypatch, Told(races=[RACE]), WRITES, access(ONE, "reads")) == []


def test_who_passes_on_waits_first(monkeypatch: pytest.MonkeyPatch):
    """Device 1 signals the reader without knowing of the write: it should wait for the writer's signal to it."""
    first = sent(ONE, 1, "to who passes on", WRITES)
    passed = sent(PASSES, 2, "passes on")
    others = [
        sent(PASSES, 0, "to another"),
        sent(ONE, 2, "by the writer"),
        sent(PASSES, 2, "knows already", WRITES),
    ]
    found = dict(asked(monkeypatch, Told(races=[RACE], sent=[first, passed, *others]), WRITES, READS))
    assert found["passes on"] == [("to who passes on", PASSES)]
    assert found["to another"] == found["by the writer"] == found["knows already"] == []
    assert found["to who passes on"] == []


ATOMIC = "an atomic update"


@pytest.mark.parametrize(
    ("first", "second", "likelier"),
    [
        (READ, ATOMIC, "the second"),
        (READ, WRITE, "the second"),
        (ATOMIC, WRITE, "the second"),
        (WRITE, READ, "the first"),
        (WRITE, WRITE, "the first"),
        (ATOMIC, ATOMIC, "the first"),
    ],
)
def test_a_write_comes_before_a_read_more_likely(first: str, second: str, likelier: str):
    one, other = SimpleNamespace(kind=first), SimpleNamespace(kind=second)
    found = list(remedies._pairs([SimpleNamespace(first=one, second=other, reuse=None)]))  # type: ignore[list-item]
    assert found[0] == ((one, other) if likelier == "the first" else (other, one))
    assert (one, other) in found and (other, one) in found
    assert len(found) == (2 if likelier == "the first" else 3)


def test_what_a_writer_uses_again_is_read_first():
    reuse = SimpleNamespace(kind=READ), SimpleNamespace(kind=WRITE)
    race = SimpleNamespace(first=reuse[0], second=reuse[1], reuse=reuse)
    assert list(remedies._pairs([race, race])) == [reuse]  # type: ignore[list-item]


class Flags:
    """Stands for the buffer of flags."""

    def same_as(self, other: Any) -> bool:
        return other is self


def signalled(name: str, index: int, value: int, flags: Flags, holder: int = 2) -> Any:
    home = SimpleNamespace(name=name, root=name, buffer=flags)
    return SimpleNamespace(home=home, index=(index,), holder=holder, value=value)


def waits(monkeypatch: pytest.MonkeyPatch, sent: Sequence[Any], where: Any, answers: Sequence[Any]) -> list[str]:
    monkeypatch.setattr(remedies.edits, "places", lambda func, line: [Place(lines=(5, 6))])
    monkeypatch.setattr(remedies.edits, "wait", lambda *given: None)
    monkeypatch.setattr(remedies.edits, "added", lambda *given, behind: None)
    given = [remedies._Answer(each, LAST) for each in answers]
    return [each.text for each in remedies._waits_before(None, Told(sent=sent), where, given)]  # type: ignore[arg-type]


def test_a_wait_is_for_a_value_that_its_flag_had(monkeypatch: pytest.MonkeyPatch):
    mine, theirs = Flags(), Flags()
    first = signalled("F", 0, 1, mine)
    others = [
        signalled("F", 0, 4, mine),
        signalled("F", 1, 7, mine),
        signalled("G", 0, 8, theirs),
        signalled("F", 0, 9, mine, holder=1),
    ]
    expected = [f'add T.wait(F[0], ">=", {value}) before line 5' for value in (1, 4)]
    assert waits(monkeypatch, [first, *others], "a line", [first]) == expected
    assert waits(monkeypatch, [first, *others], "a line", [first, others[2]]) == expected, "of one flag"


def test_without_a_line_or_a_signal_there_is_no_wait(monkeypatch: pytest.MonkeyPatch):
    first = signalled("F", 0, 1, Flags())
    assert waits(monkeypatch, [first], None, [first]) == []
    assert waits(monkeypatch, [first], "a line", []) == []


def test_signals_stand_behind_what_released_waits_order(monkeypatch: pytest.MonkeyPatch):
    """First after accesses that race with those after the wait, then after those of other units."""
    found: list[tuple[Any, list[Any]]] = []

    def signals_behind(func: Any, witness: Any, line: Any, pairs: Sequence[Any]) -> list[Any]:
        found.append((line, list(pairs)))
        return []

    monkeypatch.setattr(remedies, "_signals_behind", signals_behind)
    of_reader = SimpleNamespace(clock=READS.clock, unit=LAST)
    of_writer = SimpleNamespace(clock="another", unit=ONE)
    told = SimpleNamespace(races=[RACE], released=[of_reader, of_writer])
    list(remedies._signals(None, told))  # type: ignore[arg-type]
    assert found == [
        ("writes", [(ONE, of_reader)]),
        ("writes", [(ONE, of_reader)]),
        ("reads", [(LAST, of_writer)]),
    ]
