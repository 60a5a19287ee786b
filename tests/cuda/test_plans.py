# SPDX-License-Identifier: MIT
"""The table of plans: keys of calls, and lifetime of a plan."""

import gc
import weakref
from itertools import count

import pytest
import torch

from tilescale.backends.cuda.running.plans import ALIGNED, KEPT, LAUNCHED_BEFORE, CallPlan, CallPlans


def test_calls_are_told_apart_by_all_that_kernels_see_but_for_places():
    x = torch.zeros(8, 64)
    others = [x[1:], x.T, x.view(torch.int32), x[:, :4], torch.zeros(513)[1:].view(8, 64)]
    arguments_of = CallPlans(lambda: False).arguments_of
    forms = [arguments_of([t]).form for t in (x, *others)]
    assert len(set(forms)) == len(forms)
    elsewhere = torch.zeros(1024)
    elsewhere = elsewhere[-elsewhere.data_ptr() % ALIGNED // 4 :][x.data_ptr() % ALIGNED // 4 :][:512].view(8, 64)
    assert arguments_of([elsewhere]).form == forms[0] and arguments_of([elsewhere]).given != arguments_of([x]).given
    assert arguments_of([x.view(8, 64), 1]) == arguments_of([x, 1]) != arguments_of([x, 1.0])

    class Own(torch.Tensor):
        pass

    assert arguments_of([x.as_subclass(Own)]) is None


def test_symmetric_places_are_a_part_of_the_form():
    x, y = torch.zeros(2, 8, 64)
    arguments_of = CallPlans(lambda: False, (x.data_ptr(), x.data_ptr() + 2 * x.nbytes)).arguments_of
    assert arguments_of([x]).form != arguments_of([y]).form


def test_no_plan_ends_while_a_graph_is_captured():
    """Its own graph would be destroyed, which ends the caller's capture with an error."""
    capturing, numbers, kept = False, count(), []
    plans = CallPlans(lambda: capturing)

    def keep() -> None:
        plan = CallPlan([], {}, can_repeat=True)
        kept.append(weakref.ref(plan))
        plans.keep((next(numbers),), plan)

    def ended() -> list[int]:
        gc.collect()
        return [n for n, plan in enumerate(kept) if plan() is None]

    for _ in range(KEPT + 1):
        keep()
    assert ended() == [0]
    capturing = True
    keep()
    assert ended() == [0] and plans.get((1,)) is None, "forgotten, and still there"
    plans.clear()
    assert ended() == [0] and plans.get((2,)) is None
    capturing = False
    keep()
    assert len(ended()) == KEPT + 2 and plans.get((KEPT + 2,)) is not None


def test_calls_without_work_make_no_graph(monkeypatch: pytest.MonkeyPatch):
    """At other addresses the same form may have work, such as a copy that was one of a tensor to itself."""
    captured, compared = [], []

    class Replay:
        def __init__(self, graph: list, given: tuple, kinds: list) -> None:
            captured.append((graph, given))

        def learn(self, given: tuple, launches: list) -> None:
            compared.append(given)

        def launch(self, given: tuple, bind: object, stream: int) -> bool:
            return True

    monkeypatch.setattr("tilescale.backends.cuda.running.plans.GraphReplay", Replay)
    monkeypatch.setattr("tilescale.backends.cuda.running.plans.captured", lambda launches: launches)
    plan, copy = CallPlan([4, 4], {}, can_repeat=True), lambda: None
    for _ in range(LAUNCHED_BEFORE + 3):
        plan.launch((1, 1), lambda stand_ins: [], 0)
    plan.launch((1, 3), lambda stand_ins: [], 0)
    assert captured == []
    plan.launch((1, 2), lambda stand_ins: [copy], 0)
    plan.launch((1, 1), lambda stand_ins: [], 0)
    assert captured == [([copy], (1, 2))]
    assert compared == [(1, 3)], "with the last call before alone"
