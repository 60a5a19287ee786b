# SPDX-License-Identifier: MIT
"""Mutants without an observable difference: by path and change, the reason. They do not count in the score."""

_NEWS = "what is known already is added again, with the same values"
_MORE = "more accesses are recorded, of memory without races"
_AT_ONCE = "only another time of the clock itself decides otherwise"
_BOUND = "a bound is added that holds already"
_BEFORE = "an access before a loop has none of its names"
_POLL = "only the time between two polls differs"

EQUIVALENT: dict[str, dict[str, str]] = {
    "tilescale/backends/emulator/checks/clocks.py": {
        "known.get(clock, 0) < time -> known.get(clock, 0) <= time": _NEWS,
    },
    "tilescale/backends/emulator/checks/flags.py": {
        "time > common.get(clock, 0) -> time >= common.get(clock, 0)": _NEWS,
        "last + 1 -> max(last, 1)": "the update that the wait has read satisfies it; before a store none counts",
        "first -> 0": "the updates before are known, and skipped one by one",
    },
    "tilescale/backends/emulator/checks/races.py": {
        "not home.private and home.root not in self._constant -> True": _MORE,
        "not home.private and home.root not in self._constant -> "
        "(not home.private or home.root not in self._constant)": _MORE,
        "not (home.guarded or self._is_shared(home, clock)) or array.size == 0 -> "
        "(not (home.guarded or self._is_shared(home, clock)) and array.size == 0)": _MORE,
        "self._table.keep(shadow.cells for shadow in self._memory) -> pass": "the table of states only grows",
    },
    "tilescale/backends/tilelang/lowering/hazards.py": {
        "t.depth > at.depth -> t.depth >= at.depth": _BEFORE,
    },
    "tilescale/backends/tilelang/lowering/thread_maps.py": {
        "bool(buffer.scope() == ir.VARIABLE) -> True": "a barrier separates loads of an index from its change",
        "isinstance(one, tuple) and isinstance(other, tuple) -> (isinstance(one, tuple) or isinstance(other, tuple))": (
            "both are tuples"
        ),
    },
    "tilescale/passes/persistent/counters.py": {
        "boxes.first[axis] < 0 -> boxes.first[axis] <= 0": _BOUND,
        "boxes.last[axis] > extent -> boxes.last[axis] >= extent": _BOUND,
    },
    "tilescale/passes/persistent/placement.py": {
        "self.count <= self.blocks -> self.count < self.blocks": "a loop of one iteration",
        "self.count % self.blocks != 0 -> True": "the bounds hold for each block",
    },
    "tilescale/backends/cuda/running/copy_queue.py": {
        "self._host[-1].nbytes < nbytes -> self._host[-1].nbytes <= nbytes": "a buffer of the same size replaces one",
    },
    "tilescale/backends/cuda/running/queue_watch.py": {
        "condition.value > self._places[number - 1].condition.value -> "
        "condition.value >= self._places[number - 1].condition.value": "a place with the same value replaces one",
    },
    "tilescale/backends/cuda/running/replay.py": {
        "False -> True": "the graph refuses the same call again",
    },
    "tilescale/backends/cuda/running/wait_guard.py": {
        "time.sleep(_LOOK_S) -> pass": _POLL,
        "time.monotonic() < until -> time.monotonic() <= until": _AT_ONCE,
    },
    "tilescale/comm/admission.py": {
        "key.fileobj.fileno() >= 0 -> key.fileobj.fileno() > 0": "descriptor 0 is the standard input",
        "now > self._accept_at -> now >= self._accept_at": _AT_ONCE,
        "now > state.deadline -> now >= state.deadline": _AT_ONCE,
    },
    "tilescale/comm/session.py": {
        "time.sleep(pause) -> pass": _POLL,
        "min -> max": _POLL,
        "waited > _SLOW_S -> waited >= _SLOW_S": _AT_ONCE,
        "waited > self.timeout_s -> waited >= self.timeout_s": _AT_ONCE,
    },
    "tilescale/passes/overlap/scatter.py": {
        "rounded > exact * (1 - WORTH) -> rounded >= exact * (1 - WORTH)": "estimates that are equal to the last bit",
    },
}
