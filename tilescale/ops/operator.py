# SPDX-License-Identifier: MIT
"""An operator of `torch.library` that costs a plain call what its function costs.

PyTorch's dispatcher takes longer over an operator written in Python than a small product takes on a GPU. Who needs it
(a compiler, autograd, a mode that looks at each operator, a profiler) gets it; else the function is called by itself.
"""

from collections.abc import Callable
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operator:
    """A function as the operator `tilescale::<name>`.

    Attributes:
        register_fake, register_autograd: as those of `torch.library.custom_op`.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        defined = torch.library.custom_op(f"tilescale::{name}", function, mutates_args=())
        self.register_fake, self.register_autograd = defined.register_fake, defined.register_autograd
        self._function, self._dispatched = function, getattr(torch.ops.tilescale, name)

    def __call__(self, *given: Any) -> Any:
        """Call it with all of its arguments, in order."""
        if torch.compiler.is_compiling() or _somebody_looks() or not all(map(_is_plain, given)):
            return self._dispatched(*given)
        return self._function(*given)


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
