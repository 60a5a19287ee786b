# SPDX-License-Identifier: MIT
"""The table of plans: how calls are told apart, and when a plan ends."""

import gc
import weakref
from itertools import count

import torch

from tilescale.backends.cuda.running.plans import KEPT, Plan, Plans


def test_plans_are_told_apart_by_all_that_kernels_see():
    x = torch.zeros(8, 8)
    others = [x[1:], x.T, x.view(torch.int32), torch.zeros(8, 8), x[:, :4]]
    key_of = Plans(lambda: False).key
    keys = [key_of([t]) for t in (x, *others)]
    assert len(set(keys)) == len(keys)
    assert key_of([x.view(8, 8), 1]) == key_of([x, 1]) != key_of([x, 1.0])

    class Own(torch.Tensor):
        pass

    assert key_of([x.as_subclass(Own)]) is None


def test_no_plan_ends_while_a_graph_is_captured():
    """Its own graph would be destroyed, which ends the caller's capture with an error."""
    capturing, numbers, kept = False, count(), []
    plans = Plans(lambda: capturing)

    def keep() -> None:
        values = [next(numbers)]
        plan = Plan([], [], can_repeat=True)
        kept.append(weakref.ref(plan))
        plans.keep(values, plan)

    def ended() -> list[int]:
        gc.collect()
        return [n for n, plan in enumerate(kept) if plan() is None]

    for _ in range(KEPT + 1):
        keep()
    assert ended() == [0]
    capturing = True
    keep()
    assert ended() == [0] and plans.get([1]) is None, "forgotten, and still there"
    plans.clear()
    assert ended() == [0] and plans.get([2]) is None
    capturing = False
    keep()
    assert len(ended()) == KEPT + 2 and plans.get([KEPT + 2]) is not None
