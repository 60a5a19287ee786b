# SPDX-License-Identifier: MIT
"""Plans: what a call launches, kept for later calls with tensors at the same places.

A plan has everything bound that arguments decide, so a call that finds one evaluates nothing. When it is used for the
third time its launches become a CUDA graph, and from then on the host's part of a call is one launch. Plans that differ
only in what kernels are passed share a graph, as long as it need not be set from one to the other too often. A plan
owns none of the caller's memory: it is right for whatever tensors lie where those of its first call lay.

The first plan of a program may have to be a graph at once, so that all kernels are loaded before one of them runs: the
driver may wait for the device to load one (CUDA C++ Programming Guide, Lazy Loading), and the kernel that runs then may
wait for what the host would do next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tilescale.backends.cuda.running.replay import Replay
from tilescale.backends.cuda.running.steps import KernelLaunch, Work, run

KEPT = 512
"""Plans of one program that are kept, those used last: an operator has one for each layer of a model."""

LAUNCHED_BEFORE = 2
"""Calls after which a plan becomes a graph: capturing one takes as long as some twenty calls without."""

SET_BEFORE = 6
"""Calls for which another plan's graph was set anew, after which a plan has its own: capturing takes as long."""

Key = tuple[Any, ...]

_OTHERS = (int, float, np.generic, NoneType)
"""What a call passes that is no tensor: numbers, and None for a tensor that no statement names."""


class Plan:
    """The launches of one call, in order."""

    def __init__(
        self,
        launches: list[Work],
        passed: Sequence[int],
        *,
        can_repeat: bool,
        at_once: bool = False,
        like: Plan | None = None,
    ):
        """Of work that is bound to a call's arguments.

        Args:
            passed: positions of the scalars that kernels take and nothing else depends on: calls may differ in them.
            can_repeat: whether a graph of them does the same in each call, and may be kept: NCCL's groups can end.
            at_once: whether the first call is to be a graph already, if it can.
            like: the plan of a call whose graph differs in what kernels take alone: it serves this one too, until it
                has been set anew for this one so often that a graph of its own pays.
        """
        self._launches, self.can_repeat, self._like = launches, can_repeat, like
        self._kernels = [launch for launch in launches if isinstance(launch, KernelLaunch)]
        self._passed = tuple(passed)
        self._calls = LAUNCHED_BEFORE if at_once else 0
        self._times_set = 0
        self._graph: Replay | None = None

    def launch(self, values: Sequence[Any], stream: int | None) -> None:
        """Put everything on the current stream, of that number; None if that is captured in a graph of the caller's."""
        if self._passed:
            for kernel in self._kernels:
                kernel.take(values)
        if stream is None or not self.can_repeat or (graph := self._graph or self._replayed()) is None:
            run(self._launches)
        elif graph.run(self._kernels, stream):
            self._times_set += 1

    def of(self, values: Sequence[Any], moving: frozenset[int]) -> Plan:
        """The plan of another call, which differs in scalars that kernels take, and in where `moving` tensors lie."""
        launches = [
            launch.of(values, moving) if isinstance(launch, KernelLaunch) else launch for launch in self._launches
        ]
        return Plan(launches, self._passed, can_repeat=self.can_repeat, like=self)

    def _replayed(self) -> Replay | None:
        """The graph of a call, if there is one by now."""
        if self._graph is not None:  # of one that others are like
            return self._graph
        if self._like is not None and self._times_set < SET_BEFORE:
            return self._like._replayed()
        if self._like is None and self._calls < LAUNCHED_BEFORE:
            self._calls += 1
            return None
        self._graph = Replay(self._launches)
        return self._graph


class Plans:
    """The plans of one program that were used last.

    Attributes:
        passed: positions of scalars that only kernels depend on, by which calls are not told apart.
        moving: positions of tensors whose places only kernels depend on: from the plan for some places, that for
            others is soon made.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        """`is_capturing` says whether a graph of the caller's is being captured now."""
        import torch

        self.passed: frozenset[int] = frozenset()
        self.moving: frozenset[int] = frozenset()
        self._is_capturing = is_capturing
        self._forgotten: list[Plan] = []  # until no graph is captured: meanwhile theirs may not be destroyed
        self._alike: WeakValueDictionary[Key | None, Plan] = WeakValueDictionary()
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._plans: OrderedDict[Key | None, Plan] = OrderedDict()
        self._last: Plan | None = None  # that was used: the others have their order

    def get(self, values: Sequence[Any]) -> Plan | None:
        """The plan of a call on these arguments; None if there is none."""
        key = self.key(values)
        plan = self._plans.get(key)
        if plan is not None and plan is not self._last:
            self._plans.move_to_end(key)
            self._last = plan
        return plan

    def alike(self, values: Sequence[Any]) -> Plan | None:
        """A plan of a call that differs in the places of `moving` tensors alone; None if there is none."""
        return self._alike.get(self.key(values, exact=False))

    def keep(self, values: Sequence[Any], plan: Plan) -> None:
        """From now on the plan of calls on such arguments."""
        key = self.key(values)
        if key is None:
            return
        self._plans[key] = self._last = plan
        self._forget([self._plans.popitem(last=False)[1]] if len(self._plans) > KEPT else [])
        if plan.can_repeat:
            self._alike.setdefault(self.key(values, exact=False), plan)

    def clear(self) -> None:
        """Forget all of them: something that they are bound to has changed."""
        self._forget(self._plans.values())
        self._plans.clear()
        self._alike.clear()
        self._last = None

    def _forget(self, plans: Iterable[Plan]) -> None:
        self._forgotten += plans
        if not self._is_capturing():
            self._forgotten.clear()

    def key(self, values: Sequence[Any], exact: bool = True) -> Key | None:
        """What tells calls apart: where tensors lie, their shapes, strides and types, and scalars that matter.

        None for what cannot be told apart: a tensor of a class of its own, such as a DTensor, which has no place, and
        what no program takes. If not `exact`, places of `moving` tensors are left out, but for their device.
        """
        key: list[Any] = []
        if exact:  # mostly of plain tensors alone, and part of every call
            tensor = self._plain[0]
            for x in values:
                if x.__class__ is not tensor:
                    break
                key.append((x.data_ptr(), x.shape, x.stride(), x.dtype))
            else:
                return tuple(key)
            key.clear()
        for i, x in enumerate(values):
            kind = x.__class__
            if kind in self._plain:
                place = x.data_ptr() if exact or i not in self.moving else x.device
                key.append((place, x.shape, x.stride(), x.dtype))
            elif isinstance(x, _OTHERS):
                key.append(kind if i in self.passed else (kind, x))
            else:
                return None
        return tuple(key)


def standing_for(value: Any) -> Any:
    """A tensor at the same place that does not keep the memory there; other values are themselves."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    nbytes = value.untyped_storage().nbytes() - int(value.storage_offset()) * value.dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(value.data_ptr(), value.device, nbytes)
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, 0, value.shape, value.stride())
