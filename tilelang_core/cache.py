# SPDX-License-Identifier: MIT
"""Where stock TileLang keeps what it has compiled, which it loads and runs in later processes."""

from __future__ import annotations

from pathlib import Path

from tilelang import env

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """The folder that TILELANG_CACHE_DIR names, or the default one; it need not exist yet."""
    return Path(env.TILELANG_CACHE_DIR)
