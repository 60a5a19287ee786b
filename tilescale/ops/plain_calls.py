# SPDX-License-Identifier: MIT
"""Plain calls of a public function that repeat: done as recorded, without checks and choices that their form decides.

Argument checks and the operator's call take the host as long as everything after them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.compiler import is_compiling

from tilescale.backends import device_services
from tilescale.ops.operator import is_unobserved, noted

F = TypeVar("F", bound=Callable[..., Any])


def plain_calls_repeat(function: F) -> F:
    """Record calls of a function that gives tensors, in lists or tuples or not, and whose other arguments are hashable.

    Calls that a compiler, a mode or a profiler is to see are those of the function, and so are calls with tensors of
    another class. A call for autograd to see is recorded if one operator does all of it: later ones call that operator.
    Recorded calls raise errors that all ranks raise: so it is applied to `collective`.
    """
    repeated = device_services().repeated(lambda args, options: function(*args, **options), noted)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_compiling() or not is_unobserved():
            return function(*args, **options)
        made = repeated.replay((args, options))
        return repeated.anew((args, options)) if made is NotImplemented else made

    return call  # type: ignore[return-value]
