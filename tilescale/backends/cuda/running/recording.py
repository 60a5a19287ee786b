# SPDX-License-Identifier: MIT
"""Recorded calls of a function of tensors: its launches, allocations and operations, as a list of steps.

A function that calls programs, allocates tensors, views them and calls PyTorch's operations does the same for all
tensors of one form. While one call of it is recorded, programs report their launches, and PyTorch its operations. Each
address that a program is passed then lies in a tensor of the caller, or in one that the function has made, or is
constant. From then on a call executes these steps: views and choices cost nothing any more, and all programs between
two operations of PyTorch are one launch. C executes the steps (call_table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import _empty_strided_cuda, _reinterpret_tensor  # type: ignore[attr-defined]
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.call_table import (
    CallStep,
    LaunchStep,
    Reading,
    RecordedCall,
    TensorNumber,
    TensorView,
    set_busy,
)
from tilescale.backends.cuda.running.gemm_graph import GEMMS, gemm_graph, gemm_settings
from tilescale.backends.cuda.running.joined_graphs import PartLaunch, joined_steps
from tilescale.backends.cuda.running.kernel_graph import KernelLaunch, kernel_graph
from tilescale.backends.cuda.running.native import PLACES, ReplayRecord, ReplaySource, ReplayStep
from tilescale.backends.cuda.running.plans import span
from tilescale.backends.cuda.running.replay import GraphReplay
from tilescale.backends.cuda.running.stream_order import StreamOrder, stream_order
from tilescale.backends.cuda.running.wait_guard import WaitGuard
from tilescale.backends.services import OperatorCall
from tilescale.comm import init

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

_COPY = torch.ops.aten.copy_.default

NO_STREAM = 0
"""The stream of a call that launches nothing itself."""

_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class ProgramState(NamedTuple):
    """The state of a program that its calls depend on.

    Attributes:
        guard: the bounds of its waits; None without waits.
        order: the order of streams.
        symmetric: begin and end of the memory in which a tensor's address decides what is launched.
    """

    guard: WaitGuard | None
    order: StreamOrder
    symmetric: tuple[int, int]


class RecordedView(NamedTuple):
    """A tensor by its number, among those of the caller and those made by steps; or a view of it: its type, if that is
    another one, shape, strides and offset."""

    number: int
    form: tuple[torch.dtype | None, tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of elements of any type."""
        assert self.form is not None
        base, (dtype, shape, stride, offset) = tensors[self.number], self.form
        return _reinterpret_tensor(base if dtype is None else base.view(-1).view(dtype), shape, stride, offset)


def _allocation_like(x: torch.Tensor) -> CallStep:
    """A step that makes an uninitialized tensor."""
    if x.is_cuda and x.device.index == torch.cuda.current_device():
        # Like inductor's graphs, allocate without the dispatcher, which takes a third of a small call.
        return CallStep(_empty_strided_cuda, (tuple(x.shape), x.stride(), x.dtype), {}, True)
    return CallStep(torch.empty_strided, (tuple(x.shape), x.stride()), {"dtype": x.dtype, "device": x.device}, True)


class Recording(TorchDispatchMode):
    """A call that is recorded. `thread`: the thread of the call."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self._is_complete, self.thread = True, get_ident()
        self._tensors: list[torch.Tensor] = list(tensors)  # the caller's, then those made by steps
        self._given = len(tensors)
        self._spans = [span(x) for x in tensors]
        self._made: list[CallStep | LaunchStep] = []
        self._allocated: dict[int, int] = {}  # number of a tensor -> its allocation
        self._shaped: set[int] = set()  # tensors whose shapes an operation of PyTorch's takes
        self._steps: list[PartLaunch | ReplayStep] = []  # since the last operation of PyTorch's
        self._has_acted = False  # in a way that cannot be undone
        self._has_gemms = False
        self._constants: list[torch.Tensor] = []  # that only the function may keep
        self._callers: set[ProgramState] = set()
        self._streams: set[int] = set()
        self._spare: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch should skip Dynamo: PyTorch would import its compiler, which takes seconds, only to skip it;
        nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":  # such as collectives of other libraries
            self.fail()
        if func.is_view:
            return func(*args, **kwargs)
        if not self._is_complete:
            return self._elsewhere(func, args, kwargs) if func in _ALLOCATIONS else func(*args, **kwargs)
        if func is _COPY and _is_plain_copy(*args):
            self._steps.append(ReplayStep(None, [self._source(x.data_ptr()) for x in args[:2]], args[0].nbytes))
            return func(*args, **kwargs)
        before = None if func in _ALLOCATIONS else self._template((args, kwargs))
        is_pure = not func._schema.is_mutable
        made = self._elsewhere(func, args, kwargs) if is_pure else func(*args, **kwargs)
        results = made if isinstance(made, tuple | list) else [made]
        if _DYNAMIC & set(func.tags) or not all(map(self._is_here, results)):
            self.fail()
            return made
        gemm = gemm_graph(func, args, kwargs, made) if func in GEMMS else None
        if gemm is None and before is not None:
            self._close()
            self._has_acted = True
            positional, named = before
            given = {name: _argument(x) for name, x in named.items()}
            self._made.append(CallStep(func._op, list(map(_argument, positional)), given, is_pure))
        elif is_pure:
            self._allocated[len(self._tensors)] = len(self._made)
            self._made.append(_allocation_like(made))
        if is_pure:
            self._tensors += results
            self._spans += map(span, results)
        if gemm is not None:
            self._launched(gemm)
            self._has_gemms = True
        return made

    def called(self, kernel: Callable[..., Any], given: Sequence[Any]) -> None:
        """Launch a kernel of this device alone, and record that."""
        with no_dispatch():
            launch = kernel_graph(kernel, kernel, given) if self._is_complete else None
            if launch is None:
                kernel(*given)
        if launch is None:
            return self.fail()
        self._launched(launch)

    def _launched(self, launch: KernelLaunch) -> None:
        replay, tensors = launch
        sources = [self._source(x.data_ptr()) for x in tensors]
        self._steps.append(PartLaunch(replay, sources))
        self._constants += [x for x, source in zip(tensors, sources, strict=True) if source.tensor < 0]

    def _elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, at another address than PyTorch would choose: programs learn from calls with
        moved tensors which arguments depend on the address."""
        try:
            self._spare = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            pass
        made = func(*args, **kwargs)
        self._spare = None
        return made

    def _is_here(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device == self._tensors[0].device

    def fail(self) -> None:
        """The call does something that cannot be recorded."""
        self._is_complete = False

    def launched(self, replay: GraphReplay | None, caller: ProgramState, stream: int) -> None:
        """Record that a program has launched a graph with its present arguments; None if it launched anything else."""
        if replay is None:
            return self.fail()
        graph = replay.graph
        sources = [self._source(number) for number in graph.given]
        # The addresses of the caller's tensors can be checked before anything is executed; others must be valid
        # anywhere.
        own = [i for i, source in enumerate(sources) if source.tensor >= self._given]
        first, end = caller.symmetric
        moves = [number for number, source in zip(graph.given, sources, strict=True) if source.tensor >= 0]
        if not all(graph.known[i] for i in own) or any(first <= number < end for number in moves):
            self.fail()
        self._steps.append(PartLaunch(replay, sources))
        self._callers.add(caller)
        self._streams.add(stream)

    def _close(self) -> None:
        if not self._steps:
            return
        self._made.append(LaunchStep(ReplayRecord(joined_steps(self._steps)), self._has_acted))
        self._steps, self._has_acted = [], True

    def _source(self, number: int) -> ReplaySource:
        for i, (first, end) in enumerate(self._spans):
            if first <= number < end:
                return ReplaySource(i, number - first)
        return ReplaySource(-1, number)

    def _template(self, value: Any) -> Any:
        """An argument with its known tensors as views; unknown tensors stay as they are."""
        if isinstance(value, torch.Tensor):
            view = self._view(value)
            if view is not None and view.form is None:
                self._shaped.add(view.number)
            return view or value
        if isinstance(value, list | tuple):
            return type(value)(map(self._template, value))
        return {name: self._template(x) for name, x in value.items()} if isinstance(value, dict) else value

    def _view(self, x: torch.Tensor) -> RecordedView | None:
        first, end = span(x)
        for i, (begin, behind) in enumerate(self._spans):
            if begin <= first < min(behind, end) and end <= self._end_of_memory(i):
                base = self._tensors[i]
                same = x.dtype is base.dtype and (x.shape, x.stride()) == (base.shape, base.stride())
                if same and not x.is_neg():
                    return RecordedView(i, None)
                self._is_complete &= not x.is_neg() and (x.dtype is base.dtype or base.is_contiguous())
                dtype, offset = None if x.dtype is base.dtype else x.dtype, (first - begin) // x.dtype.itemsize
                return RecordedView(i, (dtype, tuple(x.shape), x.stride(), offset))
            if first < behind and begin < end:  # partly outside of a known tensor
                self.fail()
        return None

    def _end_of_memory(self, i: int) -> int:
        """The end of a tensor's memory, and of the caller's next tensors that follow it: if they do, it is a part of
        the form (native/replays.c)."""
        end = self._spans[i][1]
        for begin, behind in self._spans[i + 1 : self._given]:
            if begin != end or begin == behind:
                break
            end = behind
        return end

    def finished(self, made: Any) -> RecordedCall | None:
        """The record of a call that has returned these tensors, in lists or not; None if there is none."""
        self._close()
        results, few = self._results(made), len(self._tensors) <= PLACES
        if not self._is_complete or not few or self._overlap() or len(self._streams) > 1:
            return None
        order = next((each.order for each in self._callers), None) or stream_order(self._tensors[0].device)
        guards = [guard for guard in {each.guard for each in self._callers} if guard is not None]
        bounds = _CallBounds(guards, order, init().one_call, gemm_settings() if self._has_gemms else None)
        return RecordedCall(self._made, _argument(results), bounds.begin, bounds.end, bounds.refused, self._constants)

    def _results(self, made: Any) -> Any:
        if isinstance(made, list | tuple):
            return type(made)(map(self._results, made))
        if not isinstance(made, torch.Tensor):
            return made
        view = self._result(made)
        if view is None:
            self.fail()
        return view

    def _result(self, x: torch.Tensor) -> RecordedView | None:
        """A result; if it is a whole allocation, it is allocated in its shape."""
        view = self._view(x)
        if view is None or view.form is None or view.number not in self._allocated.keys() - self._shaped:
            return view
        base = self._tensors[view.number]
        is_whole = x.is_contiguous() and base.is_contiguous() and x.numel() == base.numel()
        if x.dtype is not base.dtype or not is_whole:
            return view
        self._made[self._allocated[view.number]] = _allocation_like(x)
        self._shaped.add(view.number)
        return RecordedView(view.number, None)

    def _overlap(self) -> bool:
        """Whether two of the caller's tensors share memory: an address in both is ambiguous."""
        spans = sorted(self._spans[: self._given])
        return any(one[1] > other[0] for one, other in zip(spans, spans[1:], strict=False))


@dataclass(frozen=True)
class _CallBounds:
    """Begin and end of a recorded call.

    Attributes:
        one_call: held during the call.
        settings: PyTorch's at the recording, where the call has GEMMs of PyTorch's; None elsewhere.
    """

    guards: Sequence[WaitGuard]
    order: StreamOrder
    one_call: AbstractContextManager[None]
    settings: tuple[Any, ...] | None

    def begin(self) -> int | None:
        """The stream; None, and nothing has begun, if it is captured, or GEMMs would differ. Raises as a call of the
        programs."""
        self.one_call.__enter__()
        try:
            stream = self.order.stream()
            if stream is not None and (self.settings is None or self.settings == gemm_settings()):
                for guard in self.guards:
                    guard.check()
                if stream != self.order.last:
                    self.order.begin(stream)
                return stream
        except BaseException:
            self.one_call.__exit__(None, None, None)
            raise
        self.one_call.__exit__(None, None, None)
        return None

    def end(self) -> None:
        """The call's work is on its stream, or an error ends it."""
        try:
            if self.order.records:
                self.order.end()
        finally:
            self.one_call.__exit__(None, None, None)

    def refused(self, status: int) -> None:
        """Raise DeviceError for a launch: this rank's part of the call is incomplete."""
        for guard in self.guards:
            guard.records.stop()
        raise driver.refused("cuGraphLaunch", -status)


def _argument(template: Any) -> Any:
    """An argument or result, in lists and tuples or not, that has views for tensors, as a step takes it."""
    if isinstance(template, RecordedView):
        if template.form is None:
            return TensorNumber(template.number)
        dtype, shape, stride, offset = template.form
        return TensorView(template.number, shape, stride, offset) if dtype is None else Reading(template.of)
    return type(template)(map(_argument, template)) if template.__class__ in (list, tuple) else template


def _is_plain_copy(target: torch.Tensor, source: Any, *given: Any) -> bool:
    if target.dtype is not source.dtype or target.device != source.device or target.shape != source.shape:
        return False
    return target.is_contiguous() and source.is_contiguous() and not source.is_neg() and not source.is_conj()


_current: Recording | None = None


def current_recording() -> Recording | None:
    """The call that this thread records now; None if there is none."""
    return None if _current is None or _current.thread != get_ident() else _current


def recorded(function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, RecordedCall | None]:
    """The result of a function's call on these tensors, and its record; None if it cannot be recorded."""
    global _current
    _current = recording = Recording(tensors)
    set_busy(True)
    try:
        with recording:
            made = function()
    finally:
        _current = None
        set_busy(False)
    return made, recording.finished(made)


def operator_call(call: OperatorCall, tensors: Sequence[torch.Tensor], made: Any) -> RecordedCall | None:
    """The record of a function's call that has made this of these tensors, by the call of an operator; None if it has
    changed the tensors, or the results, in another way than by passing some of them."""
    results = call.made if isinstance(call.made, list) else [call.made]
    numbers = {id(x): i for i, x in enumerate([*tensors, *results])}

    def argument(x: Any, values: bool) -> Any:
        if isinstance(x, torch.Tensor):
            return TensorNumber(numbers[id(x)])
        if x.__class__ is list or x.__class__ is tuple:
            return type(x)([argument(y, values) for y in x])
        if not values:
            raise KeyError
        return x

    try:
        arguments, result = [argument(x, True) for x in call.given], argument(made, False)
    except KeyError:
        return None
    step = CallStep(call.function, arguments, {}, True)
    return RecordedCall([step], result, lambda: NO_STREAM, lambda: None, lambda status: None)


class RecordedMemory:
    """Memory that records refer to by address, in the whole process.

    Attributes:
        generation: number of replacements, equal on all ranks. Older records are invalid.
        symmetric: begin and end of symmetric memory.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.symmetric: list[tuple[int, int]] = []

    def replaced(self) -> None:
        self.generation += 1

    def has(self, symmetric: tuple[int, int]) -> None:
        """A program has symmetric memory at these addresses."""
        if symmetric not in self.symmetric:
            self.symmetric.append(symmetric)
            self.replaced()


recorded_memory = RecordedMemory()
