# SPDX-License-Identifier: MIT
"""The one statement that is missing from a program that a check has stopped, found by trial.

The program runs again on the original arguments, and all its races and signals are recorded. They give a few
candidates: a `T.wait` before the access that comes too early, for a flag whose signal follows the other access; a
`T.signal` after the access that a wait without a signal is meant for; flags that were not zero when the call began. A
candidate is a remedy if the program ends with it without an error, in the order of that run and in the adversarial one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from tilelang_core import ir
from tilescale.alarm import raise_after
from tilescale.backends.emulator import edits
from tilescale.backends.emulator.again import Again
from tilescale.backends.emulator.checks.explain import Race, apart
from tilescale.backends.emulator.checks.states import Access
from tilescale.backends.emulator.checks.witness import Released, Sent, Witness
from tilescale.backends.emulator.edits import Place
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.run import Run
from tilescale.errors import DeadlockError, Location, RaceError, TileScaleError, UninitializedReadError
from tilescale.program.operations import Copy, operation

FOUND = (RaceError, UninitializedReadError, DeadlockError)
"""Errors that a missing wait or signal causes."""

_MOST = 20
"""Candidates that are tried for one pair of accesses."""

Term = tuple[str, ir.PrimExpr]
"""An expression as text and in the IR."""

_MOST_LINES = 4
"""Maximum number of lines after which a signal is tried."""

_AHEAD = 4
"""Maximum number of iterations by which the writer of reused buffers may be ahead of their reader."""

_LONGEST_S = 20.0
"""Time limit of the search, in seconds."""


@dataclass(frozen=True)
class Candidate:
    """A change of the program, or of its arguments. `zeroed`: parameters of flags that are cleared before the call."""

    text: str
    func: ir.PrimFunc
    zeroed: frozenset[str] = frozenset()


class _OutOfTime(Exception):
    """The search has taken too long."""


def advise(func: ir.PrimFunc, again: Again, run: Run, error: TileScaleError) -> None:
    """Say in the error's hint what to change, and where, if a candidate is a remedy."""
    try:
        with raise_after(_LONGEST_S, _OutOfTime()):
            found = _remedy(func, again, run, error)
    except Exception:  # noqa: BLE001 - out of time, or a candidate that nothing compiles: the user's error is the one to raise
        return
    if found is not None:
        error.hint = f"{found}; with that the program ends without an error\n    in general: {error.hint}"


def _remedy(func: ir.PrimFunc, again: Again, run: Run, error: TileScaleError) -> str | None:
    for candidate in _candidates(func, again, run, error):
        if all(again.is_clean(candidate.func, candidate.zeroed, seed) for seed in (again.seed, 0)):
            return candidate.text
    return None


def _candidates(func: ir.PrimFunc, again: Again, run: Run, error: TileScaleError) -> Iterator[Candidate]:
    for (name, flag), value in list(run.stale.items())[:2]:
        text = f"{flag} was {value} already when the call began: clear it, or make flags by T.alloc_flags"
        yield Candidate(text, func, frozenset([name]))
    if isinstance(error, DeadlockError):
        for where in error.where[:4]:
            witness = Witness(Location(where.file, where.line, where.what))
            again.run(func, [witness])
            yield from _signals(func, witness)
        return
    witness = Witness()
    again.run(func, [witness])
    for early, late in _pairs(witness.races):
        yield from _waits(func, witness, early, late)


def _pairs(races: Sequence[Race]) -> Iterator[tuple[Access, Access]]:
    """The accesses of the first race as (early, late) pairs, the likelier order first."""
    for race in races[:1]:
        one, other = race.first, race.second
        if race.reuse is not None:
            yield race.reuse
            return
        if one.kind == READ or other.kind == WRITE and one.kind != WRITE:
            yield other, one
        yield one, other
        yield other, one


# -- waits -------------------------------------------------------------------------------------------------------------


def _waits(func: ir.PrimFunc, witness: Witness, early: Access, late: Access) -> Iterator[Candidate]:
    if late.unit is early.unit:
        return
    pairs = [pair for race in witness.races if (pair := _alike(race, early, late)) is not None]
    answers = [_Answer(sent, other.unit) for one, other in pairs for sent in _answers(witness, one, other)]
    yield from _waits_before(func, witness, late.home.where, answers)
    for line in dict.fromkeys(sent.home.where for sent in witness.sent):  # senders must have seen what they pass on
        between = [
            _Answer(sent, passed.unit)
            for one, other in pairs
            for passed in witness.sent
            if passed.home.where == line and not passed.past.knows(one.clock, one.time)
            if passed.holder == witness.number(other.unit) and passed.unit is not one.unit
            for sent in _answers(witness, one, passed)
        ]
        yield from _waits_before(func, witness, line, between)


@dataclass(frozen=True)
class _Answer:
    """A signal, and the unit that should wait for it."""

    sent: Sent
    unit: Unit


def _waits_before(
    func: ir.PrimFunc, witness: Witness, where: Location | None, answers: Sequence[_Answer]
) -> Iterator[Candidate]:
    """Waits before a line, by the units that should wait."""
    at = edits.places(func, where) if where is not None and answers else []
    if not at:
        return
    place, first = at[0], answers[0].sent
    answers = [answer for answer in answers if answer.sent.home.buffer.same_as(first.home.buffer)]
    units, numbers = [answer.unit for answer in answers], [answer.sent.index for answer in answers]
    indices = [_fits(list(values), units, place) for values in zip(*numbers, strict=True)]
    same = [s for s in witness.sent if (s.home.root, s.index, s.holder) == (first.home.root, first.index, first.holder)]
    for *index, value in islice(product(*indices, _values(place, [s.value for s in same])), _MOST):
        made = edits.wait(first.home.buffer, [expr for _, expr in index], value[1])
        text = f'add T.wait({_element(first.home.name, index)}, ">=", {value[0]}) before line {place.lines[0]}'
        yield Candidate(text, edits.added(func, at, made, behind=False))


def _alike(race: Race, early: Access, late: Access) -> tuple[Access, Access] | None:
    """Pair the accesses of a rerun's race with `early` and `late`, if they are of the same statements; else None."""
    for one, other in ((race.first, race.second), (race.second, race.first)):
        if (one.home.where, other.home.where) == (early.home.where, late.home.where):
            return one, other
    return None


def _answers(witness: Witness, early: Access, late: Access | Sent) -> list[Sent]:
    """The first signal to a flag of the later unit that happens after the earlier access, but not after later ones."""
    mine = witness.number(late.unit)
    knower = (late.clock, late.time) if isinstance(late, Access) else (late.past.clock, late.past.time)
    found = (
        sent
        for sent in witness.sent
        if sent.holder == mine and sent.past.knows(early.clock, early.time) and not sent.past.knows(*knower)
    )
    return list(islice(found, 1))


def _values(place: Place, values: Sequence[int]) -> list[Term]:
    """Candidate values of a wait for a flag: one more per loop iteration, or a number that the flag had."""
    found: list[Term] = []
    for loop in reversed(place.loops):
        iterations, total = ir.constant(loop.extent), max(values)
        if iterations and iterations > 1 and total % iterations == 0:
            step, begin = total // iterations, ir.constant(loop.min) or 0
            for by in range(1 - begin - _AHEAD, 2 - begin):  # the weakest first
                text = loop.loop_var.name + (f" + {by}" if by > 0 else f" - {-by}" if by < 0 else "")
                text = text if step == 1 else f"{step} * ({text})"
                found.append((text, step * (loop.loop_var + by)))
    numbers = sorted({value for value in values if value > 0})
    return found + [_number(value) for value in dict.fromkeys([*numbers[:3], *numbers[-2:]])]


# -- signals -----------------------------------------------------------------------------------------------------------


def _signals(func: ir.PrimFunc, witness: Witness) -> Iterator[Candidate]:
    """Signals after accesses, such that the released waits order these accesses before what follows the waits."""
    ordered = [pair for race in witness.races for pair in ((race.first, race.second), (race.second, race.first))]
    mine = [(early, w) for early, late in ordered for w in witness.released if w.clock is late.clock]
    passed_on = [(early, w) for early, _ in ordered for w in witness.released if w.unit is not early.unit]
    for pairs in (mine, passed_on):
        for line in list(dict.fromkeys(early.home.where for early, _ in pairs))[:_MOST_LINES]:
            yield from _signals_behind(func, witness, line, [(a.unit, w) for a, w in pairs if a.home.where == line])


def _signals_behind(
    func: ir.PrimFunc, witness: Witness, line: Location | None, pairs: Sequence[tuple[Unit, Released]]
) -> Iterator[Candidate]:
    at = edits.places(func, line) if line is not None else []
    if not at:
        return
    place = at[0]
    units = [unit for unit, _ in pairs]
    indices = [_fits(list(values), units, place) for values in zip(*(each.index for _, each in pairs), strict=True)]
    flag = pairs[0][1].home
    for peer, *index in islice(product(_peers(witness, place, pairs), *indices), _MOST):
        made = edits.signal(flag.buffer, [expr for _, expr in index], peer and peer[1], place.level)
        to = f", dst={peer[0]}" if peer is not None else ""
        text = f"add T.signal({_element(flag.name, index)}{to}) after line {place.lines[1]}"
        yield Candidate(text, edits.added(func, at, made, behind=True))


def _peers(witness: Witness, place: Place, pairs: Sequence[tuple[Unit, Released]]) -> Sequence[Term | None]:
    """The `dst=` of a signal, in a scale of the level at which the units differ; None for the unit's own flag."""
    far = [(unit, wait.unit) for unit, wait in pairs if witness.number(unit) != witness.number(wait.unit)]
    if not far:
        return [None]
    levels = {apart(*pair) for pair in far}
    if place.level is None or len(far) < len(pairs) or levels != {place.level}:
        return []
    made = operation(place.stmt.value) if isinstance(place.stmt, ir.Evaluate) else None
    copied = [(str(made.peer), made.peer)] if isinstance(made, Copy) and made.level == place.level else []
    ranks = [other.around(place.level).rank for _, other in far]
    return [*copied, *_fits(ranks, [unit for unit, _ in far], place)]


# -- expressions -------------------------------------------------------------------------------------------------------


def _fits(values: Sequence[int], units: Sequence[Unit], place: Place) -> list[Term]:
    """Expressions with these values on these units: a number, ranks in scope, or else another integer in scope."""
    if len(set(values)) == 1:
        return [_number(values[0])]
    found: list[Term] = []
    for (name, var), ranks, size in _ranks(units, place):
        apart_by = {value - rank for value, rank in zip(values, ranks, strict=True)}
        if apart_by == {0}:
            found.insert(0, (name, var))
        elif len({by % size for by in apart_by}) == 1:
            by = apart_by.pop() % size
            found.append((f"({name} + {by}) % {size}", ir.FloorMod(var + by, ir.int_node(size))))
    known = {var for (_, var), _, _ in _ranks(units, place)}
    return found or [(var.name, var) for var in reversed(place.names) if var not in known]


def _ranks(units: Sequence[Unit], place: Place) -> Iterator[tuple[Term, list[int], int]]:
    """Integers in scope that differ between units: their values on each of some units, and their extents."""
    for var, level in reversed(place.ranks):
        around = [found for unit in units if (found := unit.find(level)) is not None]
        if len(around) == len(units):
            yield (var.name, var), [unit.rank for unit in around], max(unit.siblings for unit in around)
    indices = [unit.place_in_grid for unit in units]
    for axis, (var, extent, name) in enumerate(place.grid):
        if all(axis < len(index) for index in indices) and ir.constant(extent):
            yield (name, var), [index[axis] for index in indices], ir.integer(extent)


def _number(value: int) -> Term:
    return str(value), ir.int_node(value)


def _element(name: str, index: Sequence[Term]) -> str:
    return f"{name}[{', '.join(text for text, _ in index)}]"
