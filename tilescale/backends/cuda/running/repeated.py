# SPDX-License-Identifier: MIT
"""Recorded calls of operators: the steps of a function for tensors of a form are recorded, then replayed.

The host takes longer over choosing kernels, allocating, and viewing tensors as programs want them than a device takes
for small ones. These steps depend on the form of a call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilescale.backends.cuda.running import nccl
from tilescale.backends.cuda.running.call_table import CallTable, RecordedCall
from tilescale.backends.cuda.running.recording import current_recording, operator_call, recorded, recorded_memory
from tilescale.backends.services import Noted
from tilescale.comm.world import times_shrunk
from tilescale.hda.current import current_machine

TRIED = 3, 4, 5
"""Calls of a form, by number, that are recorded, until one can be: programs have to know the form first. After these it
is each one whose number is a power of two."""

FORGOTTEN = 8
"""Calls after which a record is given up that does not do for them."""


_Recorded = tuple[Any, RecordedCall | None]


class _CallForm:
    """Calls of one form, which are counted until one is recorded."""

    def __init__(self) -> None:
        self._calls = self._misses = 0
        self._is_recorded = False

    def __call__(
        self, table: CallTable, function: Callable[..., Any], given: Sequence[Any], record: Callable[[], _Recorded]
    ) -> Any:
        if self._is_recorded:
            self._misses += 1
            if self._misses == FORGOTTEN:
                table.record(self, None)
                self.__init__()  # type: ignore[misc]
            return function(*given)
        self._calls += 1
        if self._calls < TRIED[0] or (self._calls > TRIED[-1] and self._calls & (self._calls - 1)):
            return function(*given)
        made, call = record()
        table.record(self, call)
        self._is_recorded = call is not None
        return made


class RecordedCalls:
    """A function whose calls are recorded, by the form of their arguments.

    Attributes:
        function: the function.
        noted: calls a function, and returns its result with the only operator that autograd has seen; None, if there
            were others or none. Without it, calls for autograd to see are not recorded.
        replay: takes the arguments of a call, as one tuple. Returns the result of a recorded call; NotImplemented, and
            nothing done, if there is none.
    """

    def __init__(self, function: Callable[..., Any], noted: Noted | None = None):
        self.function, self.noted = function, noted
        self.replay: Callable[[tuple[Any, ...]], Any] = lambda given: NotImplemented
        self._table: CallTable | None = None
        self._generation = -1

    def __call__(self, *given: Any) -> Any:
        made = self.replay(given)
        return self.anew(given) if made is NotImplemented else made

    def anew(self, given: tuple[Any, ...]) -> Any:
        """A call that is not replayed. It may be recorded."""
        if current_recording() is not None or not uses_gpus():  # a recording has this call as a part
            return self.function(*given)
        if torch.cuda.is_current_stream_capturing():  # recordings make some things twice, and records end with graphs
            return self.function(*given)
        if self._table is None or self._generation != recorded_memory.generation:
            self._generation = recorded_memory.generation
            self._table = CallTable(recorded_memory.symmetric, _state, _CallForm, self.noted is not None)
            self.replay = self._table.replay
        found = self._table.form(given)
        if found is None:
            return self.function(*given)
        form, tensors = found
        return form(self._table, self.function, given, lambda: self._recorded(given, tensors))

    def _recorded(self, given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> _Recorded:
        """The result of a call, and its record; None if it cannot be recorded."""
        if self.noted is None or not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return recorded(lambda: self.function(*given), tensors)
        marks = _marks
        made, call = self.noted(lambda: self.function(*given))
        return made, None if call is None or _marks > marks else operator_call(call, tensors, made)


def _state() -> tuple[Any, ...]:
    """Further facts on which a call depends."""
    # Without a device type it is CUDA's, and takes a third of the time.
    cast = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda")
    return id(current_machine()), times_shrunk(), recorded_memory.generation, nccl.generation(), cast


def uses_gpus() -> bool:
    """Whether this process uses GPUs: else the code that replays is not even compiled."""
    return torch.cuda.is_initialized()


_marks = 0
"""Number of marks."""


def not_recorded() -> None:
    """Mark the current call as one that cannot be recorded."""
    global _marks
    _marks += 1
    if (recording := current_recording()) is not None:
        recording.fail()


def call_kernel(kernel: Callable[..., Any], *given: Any) -> None:
    """Call a kernel of this device alone; a call that is recorded has it as a part."""
    recording = current_recording()
    if recording is None:
        kernel(*given)
    else:
        recording.called(kernel, given)


def recorders() -> int:
    """Number of active PyTorch modes that belong to TileScale."""
    return int(current_recording() is not None)
