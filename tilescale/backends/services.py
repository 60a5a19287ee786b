# SPDX-License-Identifier: MIT
"""Functions of a back end on its devices, for operators, measurements and `tilescale doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tilescale.comm import World


class OperatorCall(NamedTuple):
    """A call of an operator that autograd has seen.

    Attributes:
        function: calls the operator in this way again.
        given: the arguments.
        made: the result, or a list of results.
    """

    function: Callable[..., Any]
    given: Sequence[Any]
    made: Any


Noted = Callable[[Callable[[], Any]], tuple[Any, OperatorCall | None]]
"""Calls a function; returns its result, and the only call of an operator that autograd has seen meanwhile, if there is
one."""


class RepeatedCalls(Protocol):
    """A function of tensors among other arguments whose calls are recorded, then replayed.

    Attributes:
        replay: takes the arguments of a call, as one tuple. Returns the result of a recorded call; NotImplemented, and
            nothing done, if there is none.
    """

    @property
    def replay(self) -> Callable[[tuple[Any, ...]], Any]: ...

    def __call__(self, *given: Any) -> Any:
        """Replay a call, or else call the function."""

    def anew(self, given: tuple[Any, ...]) -> Any:
        """Call the function with these arguments."""


@dataclass(frozen=True)
class DeviceServices:
    """Functions of a back end on its devices. Their modules load without devices.

    Attributes:
        repeated: records calls of a function; given a `Noted` function, also calls for autograd to see.
        call_kernel: calls a kernel of the device alone, its first argument, with the others. A call that is recorded
            has it as a part: PyTorch does not show it.
        not_recorded: marks the current call as one that cannot be recorded.
        recorders: number of active PyTorch modes that record calls.
        memory_replaced: says that memory was replaced to which records refer by address.
        was_read: orders work of a device's current stream since the last call of a program before the next call.
        group: the device library's process group of all ranks of a job. Collective.
        abort: ends all process groups, also while their collectives hang.
        runs_within: whether work that waits for a device ends within some seconds. Raises the device's errors.
        compiler: the compiler's path; None where there is none.
        check_cache: raises UntrustedCacheError if another user can change compiled kernels.
        library: the folder of the library by which kernels reach other hosts. Raises DependencyError.
    """

    repeated: Callable[..., RepeatedCalls]
    call_kernel: Callable[..., None]
    not_recorded: Callable[[], None]
    recorders: Callable[[], int]
    memory_replaced: Callable[[], None]
    was_read: Callable[[torch.device], None]
    group: Callable[[World], Any]
    abort: Callable[[], None]
    runs_within: Callable[[Callable[[], None], float], bool]
    compiler: Callable[[], str | None]
    check_cache: Callable[[], None]
    library: Callable[[], Path]
