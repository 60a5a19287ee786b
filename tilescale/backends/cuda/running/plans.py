# SPDX-License-Identifier: MIT
"""Plans: the launches of calls, kept for later calls of the same form, with tensors at any addresses.

A call's form is everything that decides what is launched: shapes, strides and types of its tensors, and scalars; for
tensors that peers reach, and others in symmetric memory, the addresses too. The first call of a form is bound to its
tensors and launched. The launches of the second one become a CUDA graph, and those of both show what follows addresses.
From then on the host's part of a call is to update the arguments of the graph's kernels and copies, if tensors have
moved since the call before, and one launch (replay.py).
Work that cannot be updated has a graph for each of the last addresses that came twice. A plan does not keep the
caller's memory alive.

The first plan of a program may have to be a graph at once, so that all kernels are loaded before one of them runs: the
driver may wait for the device to load one (CUDA C++ Programming Guide, Lazy Loading), and the running kernel may wait
for the host's next operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from tilelang_core.lru import LruCache
from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.graphs import captured
from tilescale.backends.cuda.running.native import UNKNOWN, CallForms
from tilescale.backends.cuda.running.replay import ArgumentKind, Arguments, Bind, GraphReplay
from tilescale.backends.cuda.running.steps import HostVariables, StreamWork, run
from tilescale.comm.heap.tensors import extent

KEPT = 512
"""Maximum number of plans of one program, the most recently used; and of bound calls of each that cannot be a graph."""

LAUNCHED_BEFORE = 1
"""Calls after which a plan becomes a graph: a launch may make memory that lasts, which no graph can."""

ALIGNED = 128
"""Bytes: kernels may be chosen by the alignment of addresses up to this. Addresses are a part of a form modulo this."""

_OTHERS = (int, float, np.generic, NoneType)
"""Arguments of a call that are not tensors: numbers, and None for an unused tensor."""

_NUMBERS = {int, float, bool, NoneType}


class CallArguments(NamedTuple):
    """A call's arguments.

    Attributes:
        form: the key of calls with the same launches.
        given: the rest, which is only passed on: addresses of tensors, and scalars of kernels.
    """

    form: tuple[Any, ...]
    given: Arguments


class CallPlan:
    """The launches of calls of one form.

    Attributes:
        known: values of variables that follow from the form.
        replay: the graph that C launches for all calls of the form that it accepts; None while there is no graph.
    """

    def __init__(
        self, kinds: Sequence[ArgumentKind], known: HostVariables, *, can_repeat: bool, at_once: bool = False
    ) -> None:
        """Plan of calls with arguments of these kinds.

        Args:
            can_repeat: whether a graph is valid in each call, and may be kept: NCCL's groups can end.
            at_once: whether the first call should be a graph already, if it can.
        """
        self._kinds, self.known, self.can_repeat = kinds, known, can_repeat
        self._calls = LAUNCHED_BEFORE if at_once else 0
        self.replay: GraphReplay | None = None
        self._bound: LruCache[Arguments, list[StreamWork]] = LruCache(KEPT)
        self._elsewhere: LruCache[Arguments, GraphReplay] = LruCache(KEPT)

    def launch(self, given: Arguments, bind: Bind, stream: int | None) -> None:
        """Put everything on the current stream, given by number; None if it is captured in the caller's graph."""
        if stream is None or not self.can_repeat:
            return run(self._launches(given, bind))
        if self._calls < LAUNCHED_BEFORE:
            self._calls += 1
            return run(self._launches(given, bind))
        if self.replay is None:
            before = next(reversed(self._bound.items()), None)
            if not (launches := self._launches(given, bind)):
                return None  # other addresses may have some
            self.replay = GraphReplay(captured(launches), given, self._kinds)
            if before is not None:
                self.replay.learn(*before)
            self._bound.clear()
        if not self.replay.launch(given, bind, stream):
            self._launch_elsewhere(given, bind, stream)
        return None

    def _launch_elsewhere(self, given: Arguments, bind: Bind, stream: int) -> None:
        """A call that the graph does not accept: addresses that come again have a graph of their own."""
        own = self._elsewhere.get(given)
        if own is None and given in self._bound:
            own = self._elsewhere[given] = GraphReplay(captured(self._launches(given, bind)), given, self._kinds)
        if own is None or not own.launch(given, bind, stream):
            run(self._launches(given, bind))

    def _launches(self, given: Arguments, bind: Bind) -> list[StreamWork]:
        return self._bound.made(given, lambda: bind(()))


class CallPlans:
    """The most recently used plans of one program.

    Attributes:
        passed: positions of scalars that only kernels depend on, and which are not a part of the form.
        fixed: positions of tensors whose addresses are a part of the form.
        symmetric: begin and end of symmetric memory: addresses there are a part of the form.
    """

    def __init__(self, is_capturing: Callable[[], bool], symmetric: tuple[int, int] = (0, 0)) -> None:
        """`is_capturing` says whether the caller captures a graph now."""
        self.passed: frozenset[int] = frozenset()
        self.fixed: set[int] = set()
        self.symmetric = symmetric
        self._is_capturing = is_capturing
        self._forgotten: list[CallPlan] = []  # while a graph is captured, graphs may not be destroyed
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._forms: CallForms | None = None  # once there is a graph
        self._replays: dict[int, GraphReplay] = {}
        self._plans: OrderedDict[tuple[Any, ...], CallPlan] = OrderedDict()
        self._last: CallPlan | None = None  # the last used: the others have their order

    def get(self, form: tuple[Any, ...]) -> CallPlan | None:
        plan = self._plans.get(form)
        if plan is not None and plan is not self._last:
            self._plans.move_to_end(form)
            self._last = plan
        return plan

    def keep(self, form: tuple[Any, ...], plan: CallPlan) -> None:
        self._plans[form] = self._last = plan
        self._forget([self._plans.popitem(last=False)[1]] if len(self._plans) > KEPT else [])

    def launch(self, values: Sequence[Any], stream: int) -> bool:
        """Launch a call of a form whose plan is a graph, bypassing the plan; False for any other call. Raises
        DeviceError: the launch fails."""
        if self._forms is None or not self._are_plain(values):
            return False
        status = self._forms.call(self._forms.table, stream, *values)
        if status < 0:
            raise driver.refused("cuGraphLaunch", -status)
        return status != UNKNOWN

    def replay(self, values: Sequence[Any]) -> GraphReplay | None:
        """The graph that `launch` launches for a call; None if there is no graph."""
        if self._forms is None or not self._are_plain(values):
            return None
        return self._replays.get(self._forms.find(self._forms.table, *values))

    def can_launch(self, plan: CallPlan, values: Sequence[Any]) -> None:
        """Let `launch` handle calls like this one of the plan, if the plan is a graph."""
        if plan.replay is None or not self._are_plain(values):
            return
        if self._forms is None:
            self._forms = CallForms([self.symmetric])
        self._forms.keep(plan.replay.graph.address, values, self.passed, self.fixed)
        self._replays[plan.replay.graph.address] = plan.replay

    def _are_plain(self, values: Sequence[Any]) -> bool:
        """Whether C may read the values: a tensor of a subclass, or one that represents its negative, is more than its
        memory."""
        for x in values:
            kind = x.__class__
            if kind in self._plain:
                if x.is_neg():
                    return False
            elif kind not in _NUMBERS:
                return False
        return True

    def clear(self) -> None:
        """Forget all plans: something they are bound to has changed."""
        self._forget(self._plans.values())
        self._plans.clear()
        self._last = None
        if self._forms is not None:
            self._forms.clear()

    def _forget(self, plans: Iterable[CallPlan]) -> None:
        for plan in plans:
            self._forgotten.append(plan)
            if self._forms is not None and plan.replay is not None:
                graph = plan.replay.graph
                graph.forget()
                self._forms.drop(graph.address)
                self._replays.pop(graph.address, None)
        if not self._is_capturing():
            self._forgotten.clear()

    def arguments_of(self, values: Sequence[Any]) -> CallArguments | None:
        """A call's form and arguments.

        None for arguments without a key: a tensor of a subclass without an address, such as a DTensor, and types that
        no program takes.
        """
        form: list[Any] = []
        given: list[Any] = []
        plain, fixed, (first, end) = self._plain, self.fixed, self.symmetric
        for i, x in enumerate(values):
            kind = x.__class__
            if kind in plain:
                place = x.data_ptr()
                where = place if first <= place < end or i in fixed else place % ALIGNED
                form.append((where, x.get_device(), x.shape, x.stride(), x.dtype, x.is_neg()))
                given.append(place)
            elif isinstance(x, _OTHERS):
                form.append(kind if i in self.passed else (kind, x))
                given.append(x if i in self.passed else None)
            else:
                return None
        return CallArguments(tuple(form), tuple(given))


def standing_for(value: Any) -> Any:
    """A tensor at the same address that does not keep the memory alive; other values are returned unchanged."""
    return standing_at(value.data_ptr(), value) if isinstance(value, torch.Tensor) and value.numel() else value


def standing_at(place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of this form at an address, which does not keep the memory alive."""
    nbytes = like.untyped_storage().nbytes() - int(like.storage_offset()) * like.dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(place, like.device, nbytes)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, like.shape, like.stride())


def span(x: torch.Tensor) -> tuple[int, int]:
    """Begin of a tensor's memory, and the end of its last element."""
    first = x.data_ptr()
    return first, first + extent(x.shape, x.stride()) * x.dtype.itemsize
