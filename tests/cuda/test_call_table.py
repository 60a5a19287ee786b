# SPDX-License-Identifier: MIT
"""Forms of calls: their arguments and tensors; the execution of recorded calls in C."""

import gc
import operator
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cuda.fakes import aligned, record_on_cpu
from tilescale.backends.cuda.running import call_table
from tilescale.backends.cuda.running.call_table import (
    CallStep,
    CallTable,
    Reading,
    RecordedCall,
    TensorNumber,
    TensorView,
)

MOST_FORMS = 1024  # as native/calls.c
Pair = namedtuple("Pair", "one other")


class Kept:
    """The object of a form."""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> CallTable:
    record_on_cpu(monkeypatch)
    return CallTable([], lambda: (0,), Kept)


def of(steps: list[CallStep], result: Any, begin: Callable[[], int | None] = lambda: 7) -> RecordedCall:
    return RecordedCall(steps, result, begin, lambda: None, lambda status: None)


def test_tensors_are_found_in_order_also_in_containers(table: CallTable):
    x, y, z = (aligned(64) for _ in range(3))
    parameter = torch.nn.Parameter(z, requires_grad=False)
    kept, found = table.form((x, "sum", [y, None, (parameter,)], {"out": x}, 2))
    assert [id(each) for each in found] == [id(each) for each in (x, y, parameter)], "each once"
    again, _ = table.form((y, "sum", [x, None, (z,)], {"out": y}, 2))
    assert again is kept, "whichever tensors"
    assert table.form((x, "sum", [y, None, (z,)], {"out": y}, 2))[0] is not kept, "but the same ones twice"


OTHERS = [
    (1, True),
    (0, False),
    (1, 1.0),
    ("1", 1),
    ([1, 2], (1, 2)),
    ([1], [2]),
    ([1, [2]], [1, 2]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 2}),
    (None, 0),
    ("", None),
    (2**40, 2**41),
    (torch.float32, torch.bfloat16),
    (torch.ones(64), None),
    (torch.ones(64), torch.ones(64, dtype=torch.int32)),
    (torch.ones(64), torch.ones(65)),
    (torch.ones(8, 8), torch.ones(8, 8).t()),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_other_arguments_are_another_form(table: CallTable, one: object, other: object):
    x = aligned(3)
    assert table.form((x, one))[0] is table.form((x, one))[0]
    assert table.form((x, one))[0] is not table.form((x, other))[0]


def test_equal_arguments_are_one_form(table: CallTable):
    """Such as a record that each call makes anew."""
    x = aligned(3)
    kept, _ = table.form((x, Pair("a", 2.5), "".join(["e", "4m3"])))
    assert table.form((x, Pair("a", 2.5), "".join(["e4", "m3"])))[0] is kept


def test_another_state_is_another_form(monkeypatch: pytest.MonkeyPatch):
    record_on_cpu(monkeypatch)
    state: list[Any] = [1, "machine"]
    table, x = CallTable([], lambda: tuple(state), Kept), aligned(3)
    kept, _ = table.form((x,))
    state[0] = 2
    assert table.form((x,))[0] is not kept
    state[0] = 1
    assert table.form((x,))[0] is kept


class _Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(1, device="meta"),
        torch.ones(1).as_subclass(_Other),
        torch.ones(1, requires_grad=True),
        torch.ones(1, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        {1, 2},
        [[[]], bytearray(1)],
    ],
)
def test_what_has_no_form(table: CallTable, x: object):
    """Tensors without data or of other classes, those that autograd sees, lazy ones, and what cannot be hashed."""
    assert table.form((torch.ones(1), [torch.ones(1), x])) is None
    assert table.replay((torch.ones(1), [torch.ones(1), x])) is NotImplemented
    assert table.form((x,)) is None


def test_without_gradients_a_leaf_is_a_tensor(table: CallTable):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert table.form((x,)) is not None
    assert table.form((x,)) is None


def test_tensors_of_another_device_have_no_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_table._python(), "device_type", call_table.CUDA)
    assert CallTable([], lambda: (0,), Kept).form((torch.ones(3),)) is None


def test_addresses_in_symmetric_memory_are_a_part_of_the_form(monkeypatch: pytest.MonkeyPatch):
    record_on_cpu(monkeypatch)
    room = torch.ones(4, 256)
    begin = room.data_ptr()
    table = CallTable([(begin, begin + room.nbytes)], lambda: (0,), Kept)
    assert table.form((room[0],))[0] is table.form((room[0],))[0]
    assert table.form((room[0],))[0] is not table.form((room[2],))[0]


def test_steps_are_executed_with_their_arguments(table: CallTable):
    x, y = aligned(4), aligned(4)
    kept, _ = table.form((x, y, 2.0))
    assert table.replay((x, y, 2.0)) is NotImplemented, "nothing is recorded yet"
    steps = [
        CallStep(torch.add, (TensorNumber(0), TensorNumber(1)), {"alpha": 3}, True),
        CallStep(torch.split, (TensorNumber(2), 2), {}, True),
        CallStep(operator.methodcaller("mul_", 2.0), (TensorNumber(3),), {}, False),
        CallStep(torch.cat, (Reading(lambda tensors: tensors[3:]),), {"dim": 0}, True),
        CallStep(torch.neg, (TensorView(5, (2, 2), (1, 2), 0),), {}, True),
    ]
    table.record(kept, of(steps, Reading(lambda tensors: [*tensors[-2:], len(tensors)])))
    for _ in range(3):
        x, y = aligned(4), aligned(4)
        made, turned, count = table.replay((x, y, 2.0))
        want = x + 3 * y
        want[:2] *= 2
        torch.testing.assert_close(made, want)
        torch.testing.assert_close(turned, -want.view(2, 2).t())
        assert count == 7, "two given, and five made"
    assert table.replay((x, y, 3.0)) is NotImplemented
    table.record(kept, None)
    assert table.replay((x, y, 2.0)) is NotImplemented


def test_sequences_of_arguments_and_results_are_made_in_each_call(table: CallTable):
    x, y = aligned(4), aligned(4)
    kept, _ = table.form((x, y))
    constant = ("sum", (1, None))
    steps = [CallStep(torch.cat, ([TensorNumber(1), TensorNumber(0), TensorView(0, (2,), (1,), 1)],), {"dim": 0}, True)]
    result = ([TensorNumber(2), (TensorNumber(0), "x")], constant, [], (), Reading(len), [constant])
    table.record(kept, of(steps, result))
    for _ in range(3):
        x, y = aligned(4), aligned(4)
        before = sys.getrefcount(x)
        ((joined, (same, name)), told, empty, nothing, count, other) = made = table.replay((x, y))
        torch.testing.assert_close(joined, torch.cat([y, x, x[1:3]]))
        assert same is x and name == "x" and made.__class__ is tuple and made[0].__class__ is list
        assert told is constant and other == [constant] and (empty, nothing, count) == ([], (), 3)
        empty.append(1)  # the next call has a list of its own
        alive = weakref.ref(joined)
        del joined, same, made
        assert alive() is None and sys.getrefcount(x) == before


def test_an_error_in_a_sequence_leaves_nothing(table: CallTable):
    x = aligned(4)
    kept = table.form((x,))[0]

    def fails(tensors: list[torch.Tensor]) -> None:
        raise ValueError("no result")

    table.record(kept, of([], [TensorNumber(0), (TensorNumber(0), Reading(fails))]))
    before = sys.getrefcount(x)
    for _ in range(3):
        with pytest.raises(ValueError, match="no result"):
            table.replay((x,))
    assert sys.getrefcount(x) == before


def test_a_call_that_cannot_begin_is_not_replayed_and_an_error_ends_it(table: CallTable):
    x, ended, computed = aligned(2), list[str](), list[str]()
    kept, _ = table.form((x,))

    def fails(x: torch.Tensor) -> torch.Tensor:
        computed.append("")
        raise RuntimeError("out of memory")

    steps = [CallStep(fails, (TensorNumber(0),), {}, True)]
    table.record(kept, RecordedCall(steps, None, lambda: None, lambda: ended.append(""), str))
    assert table.replay((x,)) is NotImplemented and not ended and not computed
    table.record(kept, RecordedCall(steps, None, lambda: 7, lambda: ended.append(""), str))
    with pytest.raises(RuntimeError, match="out of memory"):
        table.replay((x,))
    assert len(ended) == len(computed) == 1

    def refuses() -> int:
        raise ValueError("a wait failed")

    table.record(kept, of([], None, refuses))
    with pytest.raises(ValueError, match="a wait failed"):
        table.replay((x,))


@pytest.mark.parametrize("made", [None, 3, (None,), [torch.ones(1)] * 70])
def test_a_step_with_other_results_than_tensors_is_an_error(table: CallTable, made: object):
    x = aligned(2)
    kept, _ = table.form((x,))
    table.record(kept, of([CallStep(lambda: made, (), {}, True)], TensorNumber(0)))
    with pytest.raises(RuntimeError, match="other results than before"):
        table.replay((x,))


def test_a_step_may_have_many_arguments(table: CallTable):
    x = aligned(2).fill_(3.0)
    kept, _ = table.form((x,))
    step = CallStep(lambda *given, scale: sum(given[1:], given[0]) * scale, [TensorNumber(0)] * 200, {"scale": 2}, True)
    table.record(kept, of([step], TensorNumber(1)))
    assert (table.replay((x,)) == 1200).all()


def test_a_call_that_is_forgotten_while_it_runs_is_finished(table: CallTable):
    x = aligned(2)
    kept, _ = table.form((x,))

    def forget(x: torch.Tensor) -> torch.Tensor:
        table.record(kept, None)
        gc.collect()
        return x + 1

    call: RecordedCall | None = of([CallStep(forget, (TensorNumber(0),), {}, True)] * 2, TensorNumber(2))
    known = weakref.ref(call)
    table.record(kept, call)
    call = None
    gc.collect()
    torch.testing.assert_close(table.replay((x,)), x + 1)
    gc.collect()
    assert known() is None


def test_forms_are_bounded_and_let_go_of_their_objects(table: CallTable):
    class Group:
        pass

    x, groups = aligned(2), [Group() for _ in range(MOST_FORMS + 3)]
    known = [weakref.ref(group) for group in groups]
    kept = {id(made): made for made in (table.form((x, group))[0] for group in groups)}
    assert len(kept) == len(groups)
    assert table.form((x, groups[-1]))[0] is list(kept.values())[-1]
    groups.clear()
    gc.collect()
    assert sum(each() is not None for each in known) <= 4, "those since all were forgotten"
