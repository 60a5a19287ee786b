# SPDX-License-Identifier: MIT
"""Graphs that serve calls in other places: which bytes of what kernels are passed follow the arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.fakes import CONSTANT, Device
from tilescale.backends.cuda.running import replay
from tilescale.backends.cuda.running.replay import ArgumentKind, ArgumentPair, Arguments, GraphReplay, _code, kinds_of

FIRST, SECOND, THIRD = 0x7000_0000_1000, 0x7000_0000_8000, 0x7000_0002_0000
NBYTES = 4096


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Location at which graphs are captured."""
    return Device(monkeypatch)


class Calls:
    """Calls of one form: `passed` maps their arguments to those of their kernel."""

    def __init__(self, device: Device, kinds: list[ArgumentKind], passed: Callable[..., list[Any]], *given: Any):
        self._device, self._passed, self.captures = device, passed, 0
        self.graph = GraphReplay(replay.captured(self._launches(given)), given, kinds)

    def _launches(self, given: Arguments) -> list[Any]:
        self.captures += 1
        return [lambda: self._device._launched("kernel", *self._passed(*given))]

    def replayed(self, *given: Any) -> list[int] | None:
        """Arguments of the kernel in the next call; None if the graph does not support it."""
        if not self.graph.launch(given, lambda stand_ins: self._launches(given), 0):
            return None
        (passed,) = self._device.replayed[-1]
        return passed


def pointer(place: int) -> Any:
    """An address as a kernel takes it."""
    return (place).to_bytes(8, "little")


def test_addresses_inside_of_tensors_and_structures_move(device: Device):
    rest = b"descriptor"[:8]
    calls = Calls(device, [NBYTES], lambda x: [pointer(x + 64), 7, rest + pointer(x) + b"end"], FIRST)
    for place in (SECOND, THIRD, SECOND, THIRD, FIRST, SECOND):  # the graph has what the last call set, not the first
        wanted = [place + 64, 7, int.from_bytes(rest + pointer(place) + b"end", "little")]
        assert calls.replayed(place) == wanted
    assert calls.captures == 2


def test_an_earlier_call_shows_what_follows_its_addresses(device: Device):
    kinds, passed = [NBYTES, NBYTES], lambda x, y: [pointer(x), pointer(y)]
    calls = Calls(device, kinds, passed, FIRST, THIRD)
    calls.graph.learn((SECOND, FIRST), calls._launches((SECOND, FIRST)))
    assert calls.replayed(THIRD, SECOND) == [THIRD, SECOND] and calls.captures == 2


def test_an_earlier_call_with_other_launches_shows_nothing(device: Device):
    calls = Calls(device, [NBYTES], lambda x: [pointer(x)], FIRST)
    calls.graph.learn((SECOND,), [lambda: device._launched("another", pointer(SECOND))])
    calls.graph.learn((SECOND,), [])
    assert calls.replayed(FIRST) == [FIRST] and calls.captures == 1
    assert calls.replayed(THIRD) == [THIRD] and calls.replayed(SECOND) == [SECOND] and calls.captures == 2


def test_an_earlier_call_gives_tensors_no_stand_ins(device: Device):
    first = rows_of(device, FIRST, THIRD)
    made = GraphReplay(replay.captured(first(())), (FIRST, THIRD), [NBYTES, NBYTES])
    made.learn((SECOND, THIRD), rows_of(device, SECOND, THIRD)(()))
    assert made.launch((FIRST, THIRD), first, 0) and device.replayed[-1] == [[FIRST], [FIRST, THIRD]]
    assert made.launch((SECOND, THIRD), rows_of(device, SECOND, THIRD), 0)
    assert device.replayed[-1] == [[SECOND], [STAND_IN], [STAND_IN, THIRD]]


def test_scalars_are_found_when_they_change(device: Device):
    kinds = [NBYTES, np.dtype("int32"), np.dtype("float32")]

    def passed(x: int, n: int, scale: float) -> list[Any]:
        return [pointer(x), n, np.float32(scale).tobytes()]

    def bits(scale: float) -> int:
        return int.from_bytes(np.float32(scale).tobytes(), "little")

    calls = Calls(device, kinds, passed, FIRST, 3, 0.5)
    assert calls.replayed(SECOND, 4, 0.5) == [SECOND, 4, bits(0.5)] and calls.captures == 2
    assert calls.replayed(THIRD, -5, 0.5) == [THIRD, 2**32 - 5, bits(0.5)] and calls.captures == 2
    assert calls.replayed(THIRD, 6, 2.0) == [THIRD, 6, bits(2.0)] and calls.captures == 3
    assert calls.replayed(FIRST, 7, 4.0) == [FIRST, 7, bits(4.0)] and calls.captures == 3


@pytest.mark.parametrize(
    "passed",
    [
        lambda x: [pointer(x), x // 64 % 1000],  # arguments that follow no address
        lambda x: [pointer(2 * x)],
        lambda x: [pointer(x)] * (1 + (x == FIRST)),
    ],
)
def test_what_follows_places_in_another_way_is_not_served(device: Device, passed: Callable[[int], list[Any]]):
    calls = Calls(device, [NBYTES], passed, FIRST)
    assert calls.replayed(SECOND) is None
    assert calls.replayed(FIRST) is not None and calls.replayed(THIRD) is None and calls.captures == 2


def test_two_arguments_that_are_one_tensor_are_told_apart_or_stay_one(device: Device):
    def passed(x: int, y: int) -> list[Any]:
        return [pointer(x), pointer(y)]

    calls = Calls(device, [NBYTES, NBYTES], passed, FIRST, FIRST)
    assert calls.replayed(SECOND, THIRD) == [SECOND, THIRD] and calls.replayed(THIRD, FIRST) == [THIRD, FIRST]
    calls = Calls(device, [NBYTES, NBYTES], passed, FIRST, FIRST)
    assert calls.replayed(SECOND, SECOND) == [SECOND, SECOND]
    assert calls.replayed(SECOND, THIRD) is None and calls.replayed(THIRD, FIRST) is None
    assert calls.captures == 2, "both have been seen to move"
    assert calls.replayed(THIRD, THIRD) == [THIRD, THIRD]


def test_a_graph_that_the_driver_refuses_to_set_serves_nobody(device: Device):
    calls = Calls(device, [NBYTES], lambda x: [pointer(x)], FIRST)
    assert calls.replayed(FIRST) == [FIRST]
    device.refuses = True
    assert calls.replayed(SECOND) is None and calls.replayed(FIRST) is None, "it may be set in part"


STAND_IN = 0x7000_0010_0000


def rows_of(device: Device, x: int, y: int) -> Callable[[Container[int]], list[Any]]:
    """A call that copies rows of x, which may have a stand-in, then launches a kernel on both tensors."""

    def bind(stand_ins: Container[int]) -> list[Any]:
        at = STAND_IN if 0 in stand_ins else x
        copies = [("copied", x)] if 0 in stand_ins else []
        return [partial(device._launched, *map(_passed, one)) for one in (*copies, (CONSTANT, at), ("kernel", at, y))]

    return bind


def _passed(x: Any) -> Any:
    return pointer(x) if isinstance(x, int) else x


def test_tensors_at_nodes_that_the_driver_does_not_update_have_stand_ins(device: Device):
    first = rows_of(device, FIRST, THIRD)
    made = GraphReplay(replay.captured(first(())), (FIRST, THIRD), [NBYTES, NBYTES])
    assert made.launch((FIRST, THIRD), first, 0) and device.replayed[-1] == [[FIRST], [FIRST, THIRD]]
    for captures, x, y in ((3, SECOND, THIRD), (4, THIRD, FIRST), (4, FIRST, SECOND), (4, SECOND, FIRST)):
        assert made.launch((x, y), rows_of(device, x, y), 0)
        assert device.replayed[-1] == [[x], [STAND_IN], [STAND_IN, y]]
        assert len(device.graphs) == captures
    assert made.given == (SECOND, THIRD)


@pytest.mark.parametrize("together", [True, False])
def test_without_stand_ins_such_tensors_do_not_move(device: Device, together: bool):
    """An argument that overlaps another one has none, as writes to that one would not reach it."""
    places = [(x, x if together else THIRD) for x in (FIRST, SECOND, THIRD + NBYTES)]

    def launched(at: tuple[int, int]) -> bool:
        bind = rows_of(device, *at)
        return made.launch(at, bind if together else lambda stand_ins: bind(()), 0)

    made = GraphReplay(replay.captured(rows_of(device, *places[0])(())), places[0], [NBYTES, NBYTES])
    launched(places[1])
    assert not launched(places[2]) and launched(made.given), "it accepts what it was captured with"


@pytest.mark.parametrize(
    ("apart", "expected"), [(NBYTES - 1, [(0, 1)]), (NBYTES, []), (1 - NBYTES, [(0, 1)]), (-NBYTES, [])]
)
def test_tensors_side_by_side_do_not_overlap(apart: int, expected: list[tuple[int, int]]):
    one, other = ((place, place + apart) for place in (FIRST, SECOND))
    assert ArgumentPair(one, other, [NBYTES, NBYTES]).together() == expected


def test_kinds_are_bytes_of_tensors_and_types_of_scalars_that_kernels_take():
    def scalar(name: str) -> Any:
        return SimpleNamespace(buffer=None, var=SimpleNamespace(dtype=name))

    tensor = SimpleNamespace(buffer="X")
    program: Any = SimpleNamespace(
        parameters=[tensor, scalar("int32"), scalar("float32"), scalar("float4_e2m1fnx2"), tensor]
    )
    found = kinds_of(program, [torch.zeros(4, 2), 3, 0.5, 0.5, None], {1, 3})
    assert found == [32, np.dtype("int32"), None, None, 0]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (NBYTES, 0),
        (np.dtype("int32"), 4),
        (np.dtype("uint64"), 8),
        (np.dtype("float32"), 0x44),
        (np.dtype("float64"), 0x48),
        (np.dtype("float16"), 0xFF),
        (np.dtype("bool"), 0xFF),
        (None, 0xFF),
    ],
)
def test_c_converts_whole_numbers_and_wide_floats(kind: ArgumentKind, code: int):
    assert _code(kind) == code


def test_a_graph_is_instantiated_before_its_first_launch(device: Device):
    calls = Calls(device, [NBYTES], lambda x: [pointer(x)], FIRST)
    assert device.instantiated == 1
    assert calls.replayed(SECOND) == [SECOND] and device.instantiated == 1, "another capture only shows what differs"


def test_a_graph_that_a_record_keeps_has_its_nodes(device: Device):
    """The driver reads what an update passes: a record outlives the table that the graph was found in."""
    calls = Calls(device, [NBYTES], lambda x: [pointer(x)], FIRST)
    calls.replayed(SECOND)
    kept = calls.graph.graph
    del calls
    gc.collect()
    assert kept.launch((THIRD,), 0) and device.replayed[-1] == [[THIRD]]
