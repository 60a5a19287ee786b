# SPDX-License-Identifier: MIT
"""An operator of `torch.library` that costs a plain call what its function costs.

PyTorch's dispatcher takes longer over an operator written in Python than a small product takes on a GPU. Who needs it
(a compiler, autograd, a mode that looks at each operator, a profiler) gets it; else the function is called by itself.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tilescale.hda.current import current_machine, use_machine

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operator:
    """A function as the operator `tilescale::<name>`.

    Attributes:
        register_fake: as that of `torch.library.custom_op`.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self._defined = torch.library.custom_op(f"tilescale::{name}", function, mutates_args=())
        self.register_fake = self._defined.register_fake
        self._function, self._dispatched = function, getattr(torch.ops.tilescale, name)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As that of `torch.library.custom_op`; backward goes on with the machine of the call."""

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep_machine(ctx)
            setup_context(ctx, inputs, output)

        self._defined.register_autograd(with_machine(backward), setup_context=setup)

    def __call__(self, *given: Any) -> Any:
        """Call it with all of its arguments, in order."""
        if torch.compiler.is_compiling() or _somebody_looks() or not all(map(_is_plain, given)):
            return self._dispatched(*given)
        return self._function(*given)


def keep_machine(ctx: Any) -> None:
    """Keep the current machine for `with_machine`; a compiler that traces has none, what it makes asks when it runs."""
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


_dispatching, _transforming = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_profiling, _tracing = torch._C._autograd._profiler_enabled, torch._C._get_tracing_state


def _somebody_looks() -> bool:
    """Whether a mode, a transformation of functions, a profiler or a tracer is to see the operator."""
    return _dispatching() > 0 or _transforming() is not None or _profiling() or _tracing() is not None


def _is_plain(x: Any) -> bool:
    kind = x.__class__
    if kind in _PLAIN:
        return not (x.requires_grad and torch.is_grad_enabled()) and not x.is_meta
    return all(map(_is_plain, x)) if kind is list else not isinstance(x, torch.Tensor)
