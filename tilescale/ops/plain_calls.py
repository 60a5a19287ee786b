# SPDX-License-Identifier: MIT
"""Plain calls of a public function that repeat: done as recorded, without checks and choices that their form decides.

Argument checks and the operator's call take the host as long as everything after them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from tilescale.backends import device_services
from tilescale.ops.operator import PLAIN, differentiates, nobody_looks

F = TypeVar("F", bound=Callable[..., Any])

_TENSOR = object()
"""A tensor's place in a form."""


def plain_calls_repeat(function: F) -> F:
    """Record calls of a function that gives tensors, in lists or tuples or not, and whose other arguments are hashable.

    Calls that a compiler, autograd, a mode or a profiler is to see are those of the function, and so are calls with
    tensors of another class. Recorded calls raise errors that all ranks raise: so it is applied to `collective`.
    """
    repeated = device_services().repeated(lambda args, options: function(*args, **options))

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_compiling() or not nobody_looks():
            return function(*args, **options)
        tensors: list[torch.Tensor] = []
        form = _form((*args, *options.values()), tensors)
        if form is None or differentiates(tensors):
            return function(*args, **options)
        return repeated.of_form((*options, form), (args, options), tensors)

    return call  # type: ignore[return-value]


def _form(given: Any, found: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Arguments but for their plain tensors, also those in lists, which are found in order; None if a tensor does not
    own its data."""
    form: list[Any] = []
    for x in given:
        kind = x.__class__
        if kind in PLAIN:
            found.append(x)
            form.append(_TENSOR)
        elif kind is list or kind is tuple:
            inner = _form(x, found)
            if inner is None:
                return None
            form.append((kind, inner))
        elif isinstance(x, torch.Tensor):
            return None
        else:
            form.append(x if kind is str else (kind, x))
    return tuple(form)
