# SPDX-License-Identifier: MIT
"""Graphs that a recorded call launches one after the other: one launch, with the arguments of each."""

from collections.abc import Callable, Sequence

import pytest

from tests.cuda.fakes import Device
from tilescale.backends.cuda.running import replay
from tilescale.backends.cuda.running.joined_graphs import PartLaunch, joined_steps
from tilescale.backends.cuda.running.native import PLACES, ReplaySource, ReplayStep
from tilescale.backends.cuda.running.replay import GraphReplay

PLACE, FARTHER, NBYTES = 0x7000_0000_0000, 0x1_0000, 4096


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def places(first: int, count: int) -> tuple[int, ...]:
    """Addresses that do not overlap."""
    return tuple(PLACE + FARTHER * (first + i) for i in range(count))


def launches(device: Device, name: str, given: Sequence[int]) -> list[Callable[[], None]]:
    return [lambda: device._launched(name, *(place.to_bytes(8, "little") for place in given))]


def moved(device: Device, name: str, count: int, times: int = 1) -> GraphReplay:
    """The graph of a kernel with `count` tensors, which was launched in some places."""

    given = places(0, count)
    made = GraphReplay(replay.captured(launches(device, name, given)), given, [NBYTES] * count)
    for number in range(times):
        at = places((number + 1) * 2 * count, count)
        assert made.launch(at, lambda stand_ins: launches(device, name, at), 0)  # noqa: B023
    return made


def part(made: GraphReplay, first: int = 0) -> PartLaunch:
    """Its launch with the caller's tensors from a number on."""
    return PartLaunch(made, [ReplaySource(first + i, 0) for i in range(len(made.given))])


def launched(device: Device, step: ReplayStep, given: Sequence[int]) -> list[list[int]] | None:
    """Arguments of each kernel; None if the graph does not accept the call."""
    assert step.graph is not None
    return device.replayed[-1] if step.graph.launch(given, 0) else None


def test_one_launch_passes_each_graph_its_own_arguments(device: Device):
    one, other = moved(device, "one", 2), moved(device, "other", 3)
    (step,) = joined_steps([part(one), part(other, 2), part(one, 1)])
    assert step.sources == [ReplaySource(number, 0) for number in (0, 1, 2, 3, 4, 1, 2)]
    for first in (500, 700, 0):
        at = places(first, 7)
        assert launched(device, step, at) == [list(at[:2]), list(at[2:5]), list(at[5:])]
    assert one.launch(places(40, 2), list, 0), "and the graphs serve other calls as before"
    assert device.replayed[-1] == [list(places(40, 2))]


def test_launches_between_copies_are_joined(device: Device):
    one, copy = moved(device, "one", 2), ReplayStep(None, [ReplaySource(0, 0), ReplaySource(1, 0)], NBYTES)
    steps = joined_steps([part(one), copy, part(one), part(one), copy])
    assert [step.graph is None for step in steps] == [False, True, False, True]
    assert steps[0].graph is one.graph, "what is alone stays what it is"
    assert [len(step.sources) for step in steps] == [2, 2, 4, 2]


def test_no_launch_has_more_arguments_than_a_call(device: Device):
    wide, narrow = moved(device, "wide", PLACES - 1), moved(device, "narrow", 1)
    steps = joined_steps([part(narrow), part(wide), part(narrow), part(wide)])
    assert [len(step.sources) for step in steps] == [PLACES, PLACES]


def test_records_share_the_joined_graph_of_the_same_graphs(device: Device):
    one, other = moved(device, "one", 2), moved(device, "other", 1)
    before = device.instantiated
    first, second = (joined_steps([part(one), part(other, 2)])[0] for _ in range(2))
    assert first.graph is second.graph and device.instantiated == before + 1
    assert joined_steps([part(other), part(one, 1)])[0].graph is not first.graph, "another order is another graph"


def test_arguments_that_a_graph_has_not_seen_move_do_not_move(device: Device):
    still, other = moved(device, "still", 1, times=0), moved(device, "other", 1)
    (step,) = joined_steps([part(still), part(other, 1)])
    assert launched(device, step, (*still.given, *places(30, 1))) == [list(still.given), list(places(30, 1))]
    assert launched(device, step, places(30, 2)) is None
    assert still.launch(places(60, 1), lambda stand_ins: launches(device, "still", places(60, 1)), 0)
    (again,) = joined_steps([part(still), part(other, 1)])
    assert launched(device, again, places(80, 2)) == [[place] for place in places(80, 2)], "a later record may move it"


def test_it_is_forgotten_with_its_first_part_that_is(device: Device):
    one, other = moved(device, "one", 1), moved(device, "other", 1)
    (step,) = joined_steps([part(one), part(other, 1)])
    other.graph.forget()
    assert launched(device, step, places(30, 2)) is None and one.graph.launch(places(30, 1), 0)
    assert len(joined_steps([part(one), part(other, 1)])) == 2


def test_a_graph_that_the_driver_refuses_to_set_is_made_anew(device: Device):
    one = moved(device, "one", 1)
    (step,) = joined_steps([part(one), part(one, 1)])
    device.refuses = True
    assert launched(device, step, places(30, 2)) is None
    device.refuses = False
    assert launched(device, step, places(30, 2)) is None, "it may be set in part"
    (again,) = joined_steps([part(one), part(one, 1)])
    assert launched(device, again, places(30, 2)) == [[place] for place in places(30, 2)]


def test_graphs_that_the_driver_does_not_join_are_launched_each(device: Device):
    one = moved(device, "one", 1)
    device.keeps_apart = True
    steps = joined_steps([part(one), part(one, 1)])
    assert [step.graph for step in steps] == [one.graph, one.graph]
    for step, first in zip(steps, (30, 40), strict=True):
        assert launched(device, step, places(first, 1)) == [[*places(first, 1)]]
