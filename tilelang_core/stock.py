# SPDX-License-Identifier: MIT
"""Stock TileLang's language, under one name for the dialect built on it."""

from tilelang import language as module
from tilelang.language import *  # noqa: F403
from tilelang.language import __all__ as _names

__all__ = [*_names, "module"]  # noqa: PLE0604 - the stock list is a tuple of names
