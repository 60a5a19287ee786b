# SPDX-License-Identifier: MIT
"""Order that accesses require: synchronization, completion and fences, along one path and where paths meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilescale.backends.tilelang.lowering.markers import ExecutingThreads
from tilescale.backends.tilelang.lowering.order_state import RequiredOrder, completed, fenced, merged, synced
from tilescale.backends.tilelang.lowering.touches import MemoryAccess
from tilescale.program.regions import BoundVariables

WHOLE, HALF = ExecutingThreads(0, 128), ExecutingThreads(0, 64)


def touch(writes: bool = True, **changes: Any) -> MemoryAccess:
    """An access by all threads, any of which may make it."""
    access: Any = SimpleNamespace(writes=writes, reads=not writes)
    given = {"by": WHOLE, "thread": None, "generic": True, "bulk": False, **changes}
    return MemoryAccess(("access",), access, BoundVariables(), **given)


PLAIN, LOAD = touch(), touch(writes=False)
BULK_STORE, BULK_LOAD = touch(bulk=True, generic=False), touch(writes=False, bulk=True)


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        (PLAIN, LOAD, (True, False, False)),
        (touch(synced=WHOLE), LOAD, None),
        (touch(synced=HALF), LOAD, (True, False, False)),
        (BULK_STORE, LOAD, (True, True, False)),
        (touch(bulk=True, generic=False, synced=WHOLE), LOAD, (True, True, False)),
        (touch(bulk=True, generic=False, synced=WHOLE, complete=True), LOAD, None),
        (touch(writes=False, bulk=True, generic=False, synced=WHOLE), PLAIN, None),
        (PLAIN, BULK_LOAD, (True, False, True)),
        (touch(synced=WHOLE), BULK_LOAD, (False, False, True)),
        (touch(synced=WHOLE, fenced=True), BULK_LOAD, None),
        (touch(bulk=True, generic=False, synced=WHOLE, complete=True), BULK_LOAD, None),
    ],
)
def test_what_an_access_needs(earlier: MemoryAccess, later: MemoryAccess, expected: tuple[bool, bool, bool] | None):
    need = RequiredOrder.of(earlier, later)
    assert (need and (need.sync, need.complete, need.fence)) == expected
    if need is not None:
        ((_, done),) = need.applied({("access",): earlier}, WHOLE).items()
        assert RequiredOrder.of(done, later) is None, "it is enough"


def test_needs_of_several_accesses_are_one_need():
    fence, complete = RequiredOrder.of(touch(synced=WHOLE), BULK_LOAD), RequiredOrder.of(BULK_STORE, LOAD)
    assert fence is not None and complete is not None
    for both in (fence.with_(complete), complete.with_(fence)):
        assert (both.sync, both.complete, both.fence, len(both.pairs)) == (True, True, True, 2)


def test_completion_is_of_bulk_stores_and_asks_for_a_new_barrier():
    kept = {"plain": touch(synced=WHOLE), "load": touch(writes=False, bulk=True, synced=WHOLE)}
    done = touch(bulk=True, synced=WHOLE, complete=True)
    state: Any = completed({**kept, "done": done, "store": touch(bulk=True, synced=WHOLE)})
    assert state == {**kept, "done": done, "store": touch(bulk=True, complete=True)}


def test_barriers_and_fences_are_for_accesses_of_their_threads():
    state: Any = {"whole": PLAIN, "half": touch(by=HALF)}
    assert synced(state, HALF) == {"whole": PLAIN, "half": touch(by=HALF, synced=HALF)}
    assert fenced(synced(state, HALF)) == {"whole": PLAIN, "half": touch(by=HALF, synced=HALF, fenced=True)}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"synced": WHOLE}, {"synced": WHOLE}, {"synced": WHOLE}),
        ({"synced": WHOLE}, {"synced": HALF}, {"synced": HALF}),
        ({"synced": WHOLE}, {}, {}),
        ({"complete": True}, {}, {}),
        ({"fenced": True}, {}, {}),
        ({"complete": True, "fenced": True}, {"complete": True, "fenced": True}, {"complete": True, "fenced": True}),
    ],
)
def test_where_paths_meet_only_what_both_have_counts(one: Any, other: Any, expected: Any):
    for a, b in ((one, other), (other, one)):
        made: Any = merged({"access": touch(**a)}, {"access": touch(**b)})  # type: ignore[dict-item]
        assert made == {"access": touch(**expected)}
    assert merged({("one",): PLAIN}, {("other",): LOAD}) == {("one",): PLAIN, ("other",): LOAD}
