# SPDX-License-Identifier: MIT
"""Plain calls of a public function that repeat: done as recorded, without checks and choices that their form decides.

Argument checks and the operator's call take the host as long as everything after them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from tilescale.ops.operator import PLAIN, differentiates, somebody_looks
from tilescale.ops.repeated import RecordedCalls

F = TypeVar("F", bound=Callable[..., Any])


def plain_calls_repeat(function: F) -> F:
    """Record calls of a function that gives tensors, in lists or tuples or not, and whose other arguments are hashable.

    Calls that a compiler, autograd, a mode or a profiler is to see are those of the function, and so are calls with
    tensors of another class.
    """
    repeated = RecordedCalls(lambda args, options: function(*args, **options))

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        tensors: list[torch.Tensor] = []
        if torch.compiler.is_compiling() or not _are_plain((*args, *options.values()), tensors):
            return function(*args, **options)
        if differentiates(tensors) or somebody_looks():
            return function(*args, **options)
        return repeated((args, options), tensors)

    return call  # type: ignore[return-value]


def _are_plain(given: Any, found: list[torch.Tensor]) -> bool:
    """Whether all tensors among arguments, and in lists there, own their data; finds them in order."""
    for x in given:
        kind = x.__class__
        if kind in PLAIN:
            found.append(x)
        elif kind is list or kind is tuple:
            if not _are_plain(x, found):
                return False
        elif isinstance(x, torch.Tensor):
            return False
    return True
