# SPDX-License-Identifier: MIT
"""Stock TileLang's language, under one name for the dialect built on it."""

from typing import TYPE_CHECKING, Any

from tilelang import language as module  # noqa: F401 - names that its `__all__` leaves out
from tilelang.language import *  # noqa: F403
from tilelang.language import __all__ as __all__

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The names of TileLang's language, which has no types."""
