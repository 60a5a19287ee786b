# SPDX-License-Identifier: MIT
"""Entry points of serving engines, which call them in every process once TileScale is installed.

So they do nothing, and import nothing, unless `TILESCALE_PLUGIN` asks for them.
"""

from __future__ import annotations

from tilescale.settings import settings


def vllm() -> None:
    """The plugin of `vllm.general_plugins`."""
    if settings().plugin:
        from tilescale.ops import engine_plugins

        engine_plugins.vllm()


def sglang() -> None:
    """The plugin of `sglang.srt.plugins`."""
    if settings().plugin:
        from tilescale.ops import engine_plugins

        engine_plugins.sglang()
