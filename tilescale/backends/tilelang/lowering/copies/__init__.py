# SPDX-License-Identifier: MIT
"""Copies between units: one file for each mechanism, which registers its rule.

Copies by the host (copy engine, NCCL) have no rule here: they are planned as host steps.
"""

import importlib
import pkgutil
from functools import cache


@cache
def register() -> None:
    """Let every file of this folder register its rules, at the first request."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
