# SPDX-License-Identifier: MIT
"""Recorded calls of operators: the steps of a function for tensors of a form are recorded, then replayed.

The host takes longer over choosing kernels, allocating, and viewing tensors as programs want them than a device takes
for small ones. These steps depend on the form of a call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilescale.backends.cuda.running.native import PLACES, CallForms
from tilescale.backends.cuda.running.recording import Recorded, current_recording, recorded, recorded_memory
from tilescale.comm.world import times_shrunk
from tilescale.hda.current import current_machine

TRIED = (6, 7, 8, 12, 20, 40)
"""Calls of a form, by number, that are recorded, until one can be: programs have to know the form first."""

FORGOTTEN = 8
"""Calls after which a record is given up that does not do for them."""

KEPT = 256
"""Forms that are kept for the same arguments but for tensors, and such arguments: then all are forgotten."""


class _CallForm:
    """Calls of one form, which are counted until one is recorded."""

    def __init__(self) -> None:
        self._calls = self._misses = 0
        self.recorded: Recorded | None = None

    def __call__(self, function: Callable[..., Any], given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        if torch.cuda.is_current_stream_capturing():  # a recording makes some things twice, which a graph would repeat
            return function(*given)
        if self.recorded is not None:
            self._misses += 1
            if self._misses == FORGOTTEN:
                self.__init__()  # type: ignore[misc]
            return function(*given)
        self._calls += 1
        if self._calls not in TRIED:
            return function(*given)
        made, self.recorded = recorded(lambda: function(*given), tensors)
        return made


_is_negative, _is_conjugate = torch.Tensor.is_neg, torch.Tensor.is_conj


class RecordedCalls:
    """A function of an operator, of plain tensors among other arguments, for which calls of a form are recorded."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._tables: dict[Any, tuple[CallForms, list[_CallForm]]] = {}

    def __call__(self, form: tuple[Any, ...], given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        if current_recording() is not None or not are_on_gpus(tensors):  # a recording has this call as a part
            return self.function(*given)
        if any(map(_is_negative, tensors)) or any(map(_is_conjugate, tensors)):
            return self.function(*given)
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key: tuple[Any, ...] = id(current_machine()), times_shrunk(), recorded_memory.generation, cast, form
        if 1 < len(tensors) != len(set(map(id, tensors))):  # such as a result in place: forms differ by position
            alone = list({id(x): x for x in tensors}.values())
            key, tensors = (*key, *[next(i for i, y in enumerate(alone) if y is x) for x in tensors]), alone
        try:
            table = self._tables.get(key)
        except TypeError:  # an argument that is not supported, as the function says
            return self.function(*given)
        if table is None:
            if len(self._tables) == KEPT:
                self._tables.clear()
            table = self._tables[key] = CallForms(recorded_memory.symmetric), []
        forms, known = table
        number = forms.find(forms.table, *tensors)
        if not number:
            if len(known) == KEPT:
                forms.clear()
                known.clear()
            known.append(_CallForm())
            number = len(known)
            forms.keep(number, tensors)
        calls = known[number - 1]
        if calls.recorded is not None:
            made = calls.recorded(tensors)
            if made is not None:
                return made
        return calls(self.function, given, tensors)


def are_on_gpus(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether calls on tensors can be recorded: there are some, on GPUs, and not too many."""
    return bool(tensors) and tensors[0].is_cuda and len(tensors) < PLACES


def not_recorded() -> None:
    """Mark the current call as one that cannot be recorded."""
    if (recording := current_recording()) is not None:
        recording.fail()


def recorders() -> int:
    """Number of active PyTorch modes that belong to TileScale."""
    return int(current_recording() is not None)
