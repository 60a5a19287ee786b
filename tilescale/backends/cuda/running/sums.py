# SPDX-License-Identifier: MIT
"""Values of flags that the copy queue adds to: a stream writes the sum."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilescale.backends.cuda.running.steps import ProgramCall
from tilescale.backends.cuda.running.stream_memory import Word


@dataclass
class FlagSums:
    """Values of flags after the queue's additions in a call: they start at zero, and only the queue adds."""

    _call: Callable[[], Any] = lambda: None
    _values: dict[Word, int] = field(default_factory=dict)

    def after(self, call: ProgramCall, word: Word, value: int, op: str) -> int:
        """The number to write for a signal."""
        if self._call() is not call:
            self._call, self._values = weakref.ref(call), {}
        self._values[word] = value + (self._values.get(word, 0) if op == "add" else 0)
        return self._values[word]
