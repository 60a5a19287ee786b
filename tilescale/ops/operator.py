# SPDX-License-Identifier: MIT
"""An operator of `torch.library` that costs a plain call what its function costs.

PyTorch's dispatcher takes longer over an operator written in Python than a small GEMM takes on a GPU. Callers that need
it (a compiler, autograd, a mode that observes each operator, a profiler) go through it; other calls run the function
directly. A compiled graph calls the dispatcher. There the operator has one kernel for autograd and all that is below
it: `torch.library.custom_op` has two in Python, and takes three times as long.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from inspect import signature
from itertools import chain, zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from tilescale.backends import device_services
from tilescale.backends.services import OperatorCall
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine, use_machine
from tilescale.ops.dtensors import DTensorPlacement, is_dtensor, with_own_storage
from tilescale.ops.group import name_in_graphs
from tilescale.runtime import ahead

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Classes of plain tensors."""

Kept = tuple[Any, ...]
"""A result for autograd, and the parts of a `_Context`."""

_Call = Callable[[Sequence[Any]], Kept]
"""Calls an operator, or its function, with all arguments."""


_library = torch.library.Library("tilescale", "FRAGMENT")


class Operator:
    """A function as the operator `tilescale::<name>`.

    Attributes:
        plain: the function itself, whose keyword-only arguments the operator does not have.
        function: what the operator computes.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.plain, self.function = name, function, _computed(function)
        schema = torch.library.infer_schema(self.function, mutates_args=())
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, lambda *given: self._called(given), "CompositeExplicitAutograd")
        _library.impl(name, self._called_by_dispatcher, "Autograd")
        parameters = signature(self.function).parameters
        self._arguments = {name: "Tensor" in str(p.annotation) for name, p in parameters.items()}
        self._group = [*self._arguments].index("group") if "group" in self._arguments else None
        self._dispatched = getattr(torch.ops.tilescale, name).default
        repeated = device_services().repeated
        self._repeated, self._repeated_backward = repeated(self.function), repeated(self._gradients)
        self._repeated_forward = repeated(lambda *given: self._kept(lambda given: self.function(*given), given))
        self._setup: Callable[..., None] | None = None
        self._gives_list = False
        _known[name] = self

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register a fake implementation, as `torch.library.custom_op` does."""
        torch.library.register_fake(f"tilescale::{self.name}", fake, lib=_library)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, saves: str = "", setup_context: Callable[..., None] | None = None
    ) -> None:
        """Register a backward, as `torch.library.custom_op` does; it runs with the machine of the call.

        Arguments that the backward gives no gradient for are last.

        Args:
            saves: names of the tensors, or lists of some, that the backward needs. Its context has the other arguments
                by their names: a tensor or a list of some as whether there is any.
            setup_context: the same by hand.
        """
        saved, arguments = saves.split(), self._arguments

        def by_name(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            given = dict(zip(arguments, inputs, strict=True))
            ctx.save_for_backward(*_tensors([given.pop(name) for name in saved]))
            for name, x in given.items():
                setattr(ctx, name, x if not arguments[name] else bool(x) if x.__class__ is list else x is not None)

        self._setup, self._backward = setup_context or by_name, backward

    @property
    def is_seen(self) -> bool:
        """Whether a compiler, a mode, or a profiler has to observe the call."""
        return torch.compiler.is_compiling() or is_observed()

    def __call__(self, *given: Any) -> Any:
        """Call it with all of its arguments, in order. A DTensor among them is replaced by its shard, and its gradient
        is a DTensor with the same placement."""
        if self.is_seen:
            shards = list(map(_shard, given))
            if self._group is not None and torch.compiler.is_compiling():
                shards[self._group] = name_in_graphs(shards[self._group])
            return self._dispatched(*shards)
        made = self._repeated.replay(given)
        if made is not NotImplemented:
            return made
        tensors = _tensors(given)
        is_plain = PLAIN.issuperset(map(type, tensors))
        is_known = is_plain or all([x.__class__ in PLAIN or is_dtensor(x) for x in tensors])
        if any([x.is_meta for x in tensors]) or not is_known:
            return self._dispatched(*given)
        if differentiates(tensors):
            made = self._differentiated(given, tensors, self._forward)
            if _notes is not None:
                _notes.append(OperatorCall(_apply, (self, self._forward, given, *tensors), made))
            return made
        return self._repeated.anew(given) if is_plain else self._called(list(map(_shard, given)))

    def _called_by_dispatcher(self, *given: Any) -> Any:
        """Entry for PyTorch's dispatcher: skips the layers below autograd if no mode or tracer is active."""
        made = NotImplemented if (is_seen := is_observed()) else self._repeated.replay(given)
        if made is not NotImplemented:
            return made
        tensors = _tensors(given)
        if is_seen and _is_transformed(tensors):
            raise UsageError(
                f"tilescale::{self.name} is differentiated by torch.func or in forward mode",
                hint="differentiate by backward() or torch.autograd.grad, and twice by its create_graph=True",
            )
        is_plain = not is_seen and PLAIN.issuperset(map(type, tensors)) and not any([x.is_meta for x in tensors])
        if differentiates(tensors):
            forward = self._forward if is_plain else self._forward_below_autograd
            return self._differentiated(given, tensors, forward)
        return self._repeated.anew(given) if is_plain else self._called_below_autograd(list(map(_shard, given)))

    def _called(self, given: Sequence[Any]) -> Any:
        return self._repeated(*given)

    def _called_below_autograd(self, given: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self._dispatched(*given)

    def _differentiated(self, given: Sequence[Any], tensors: Sequence[torch.Tensor], forward: _Call) -> Any:
        made = _apply(self, forward, given, *tensors)
        return list(made) if self._gives_list else made

    def _forward(self, given: Sequence[Any]) -> Kept:
        return self._repeated_forward(*given)

    def _forward_below_autograd(self, given: Sequence[Any]) -> Kept:
        return self._kept(self._called_below_autograd, given)

    def _kept(self, call: Callable[[Sequence[Any]], Any], given: Sequence[Any]) -> Kept:
        """The result of a call, as autograd takes it, and what its backward needs. A dry run that has met kernels here
        calls that, too: their compilation begins with that of the forward's."""
        met, ctx = ahead.met(), _Context(given)
        made = call(given)
        self._gives_list = made.__class__ is list
        if self._setup is not None:
            self._setup(ctx, given, made)
            if ahead.met() > met:
                self.gradients(ctx, ctx.saved_tensors, ctx.zeros(_tensors([made])))
        return tuple(made) if self._gives_list else made, *ctx.parts()

    def gradients(self, ctx: Any, saved: Sequence[Any], grads: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """The gradients of all tensors among the arguments. Raises RuntimeError if it has no backward."""
        if self._setup is None:
            raise RuntimeError(f"tilescale::{self.name} has no backward")
        with _MACHINE_STAYS if ctx.machine is current_machine() else use_machine(ctx.machine):
            return self._repeated_backward(ctx.kept, saved, grads)

    def _gradients(self, kept: Sequence[Any], saved: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
        counts, *named = kept
        ctx = SimpleNamespace(saved_tensors=saved, **dict(zip(named[::2], named[1::2], strict=True)))
        made = self._backward(ctx, list(grads)) if self._gives_list else self._backward(ctx, *grads)
        found: list[torch.Tensor | None] = []
        for count, grad in zip_longest(counts, made if isinstance(made, tuple) else (made,)):
            found += grad if grad.__class__ is list else [grad] * count
        return found


_notes: list[OperatorCall] | None = None


def noted(function: Callable[[], Any]) -> tuple[Any, OperatorCall | None]:
    """The result of a function, and the only call of an operator that autograd has seen meanwhile, if there is one."""
    global _notes
    notes: list[OperatorCall] = []
    _notes = notes
    try:
        made = function()
    finally:
        _notes = None
    return made, notes[0] if len(notes) == 1 else None


_MACHINE_STAYS = nullcontext()


class _Context:
    """A context as autograd's. Other attributes are those of the operator, for its backward.

    Attributes:
        counts: how many tensors each argument of the call is.
        saved_tensors: tensors, and None.
        constant: results without gradients.
        materializes: whether results that are not used have gradients of zeros.
        machine: that of the call.
    """

    __slots__ = ("__dict__", "constant", "counts", "machine", "materializes", "saved_tensors")

    def __init__(self, given: Sequence[Any]) -> None:
        self.counts = tuple(len(_tensors([x])) for x in given)
        self.saved_tensors: Sequence[torch.Tensor | None] = ()
        self.constant: Sequence[torch.Tensor] = ()
        self.materializes = True
        self.machine: Machine | None = None
        keep_machine(self)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *results: torch.Tensor) -> None:
        self.constant = results

    def set_materialize_grads(self, materialize: bool) -> None:
        self.materializes = materialize

    @property
    def kept(self) -> tuple[Any, ...]:
        """The counts, and the operator's attributes: each one's name and value."""
        return self.counts, *chain.from_iterable(vars(self).items())

    def parts(self) -> tuple[Any, ...]:
        return self.saved_tensors, self.constant, self.materializes, self.machine, self.kept

    def zeros(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of results."""
        constant = set(map(id, self.constant))
        return [None if id(x) in constant else torch.zeros_like(x) for x in results]


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its positional arguments, whose results may be changed in place: autograd forbids that for views of
    its own tensors."""

    @wraps(function)
    def call(*given: Any) -> Any:
        made = function(*given)
        return [_no_view(x) for x in made] if made.__class__ is list else _no_view(made)

    own = signature(function)
    parameters = [p for p in own.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    vars(call)["__signature__"] = own.replace(parameters=parameters)
    return call


def _no_view(x: Any) -> Any:
    return x.data if x.__class__ is torch.Tensor and x._is_view() else x


_known: dict[str, Operator] = {}


def operator_of(name: str) -> Operator:
    """The operator of a name, for those whose backward is the other."""
    return _known[name]


class _AutogradStep(torch.autograd.Function):
    """A call of an operator as one step of autograd: that of `torch.library` takes the host several times as long."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, operator: Operator, call: _Call, given: Sequence[Any], *tensors: torch.Tensor
    ) -> Any:
        ctx.operator, ctx.dtensors = operator, None
        if not PLAIN.issuperset(map(type, tensors)):
            ctx.dtensors = [x if is_dtensor(x) else None for x in tensors]
            given = [_shard(x) for x in given]
        made, saved, constant, materializes, ctx.machine, ctx.kept = call(given)
        ctx.save_for_backward(*saved)
        if constant:
            ctx.mark_non_differentiable(*constant)
        if not materializes:
            ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # noqa: D102
        saved, dtensors = ctx.saved_tensors, ctx.dtensors
        if dtensors is None:
            return None, None, None, *ctx.operator.gradients(ctx, saved, grads)
        if torch.is_grad_enabled():  # the gradients have gradients themselves
            saved = [_differentiable(x, dtensors) for x in saved]
        pairs = zip(ctx.operator.gradients(ctx, saved, grads), dtensors, strict=True)
        made_of = [x if one is None else DTensorPlacement.of(one).made_of(with_own_storage(x)) for x, one in pairs]
        return None, None, None, *made_of


def _differentiable(saved: torch.Tensor | None, dtensors: Sequence[Any]) -> torch.Tensor | None:
    """A saved tensor; instead of a shard, which autograd does not know, a part of its DTensor."""
    if saved is None:
        return None
    return next((one.to_local() for one in dtensors if one is not None and saved.is_set_to(one._local_tensor)), saved)


_apply = super(torch.autograd.Function, _AutogradStep).apply
"""Without the check for functorch's tensors, which cannot occur at this call."""


def keep_machine(ctx: Any) -> None:
    """Keep the current machine for `with_machine`; under a compiler's trace there is none, and its graph asks when it
    runs."""
    ctx.machine = None if torch.compiler.is_compiling() else current_machine()


def with_machine(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward for the machine of its forward: on GPUs it runs in a thread of PyTorch's, which knows of no other."""

    def call(ctx: Any, *grads: Any) -> Any:
        with nullcontext() if ctx.machine is None else use_machine(ctx.machine):
            return backward(ctx, *grads)

    return call


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function, whose annotations say its schema, an operator."""
    return lambda function: Operator(name, function)


def differentiates(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd has to record an operation on these tensors."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


def _is_transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a transformation of functions, or forward mode, differentiates with respect to one of these tensors."""
    if forward_ad._current_level >= 0 and any([forward_ad.unpack_dual(x).tangent is not None for x in tensors]):
        return True
    return _transforming() is not None and differentiates(tensors)


_dispatching, _transforming = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_profiling, _tracing = torch._C._autograd._profiler_enabled, torch._C._get_tracing_state
_recorders = device_services().recorders


def is_observed() -> bool:
    """Whether a mode, a transformation of functions, forward mode, a profiler or a tracer is to see the operator."""
    return _dispatching() > _recorders() or _is_traced()


def is_unobserved() -> bool:
    """Whether there is none of these, and no call is recorded in this thread: a recording is a mode, too."""
    return not _dispatching() and not _is_traced()


def _is_traced() -> bool:
    return _transforming() is not None or _profiling() or _tracing() is not None or forward_ad._current_level >= 0


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, and in lists among them."""
    tensors: list[torch.Tensor] = []
    for x in given:
        kind = x.__class__
        if kind is list:
            tensors += [y for y in x if _is_tensor(y.__class__)]
        elif _is_tensor(kind):
            tensors.append(x)
    return tensors


@cache
def _is_tensor(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)


def _shard(x: Any) -> Any:
    """This rank's part of what may be a DTensor, or a list with some."""
    return [_shard(one) for one in x] if isinstance(x, list) else x.to_local() if is_dtensor(x) else x
