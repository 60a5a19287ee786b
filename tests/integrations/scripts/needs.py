# SPDX-License-Identifier: MIT
"""Modules of engines, which may not be installed here, or need more than is."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

os.environ |= {
    "VLLM_PLUGINS": "tilescale",  # none of its own
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",  # the second version needs a GPU to be imported
}
LOADERS = {"vllm": ("vllm.plugins", "load_general_plugins"), "sglang": ("sglang.srt.plugins", "load_plugins")}
"""The function of each engine that finds and loads plugins."""

SLOTS = {
    "vllm": "vllm.distributed.device_communicators.custom_all_reduce",
    "sglang": "sglang.srt.distributed.device_communicators.custom_all_reduce",
}
"""The module of each engine that has its custom all-reduce."""


def needed(name: str) -> ModuleType:
    """Import a module; without it the script ends, with the reason."""
    try:
        return import_module(name)
    except Exception as error:  # noqa: BLE001 - what packages do when they are imported without GPUs
        print(f"skipped: {name} cannot be imported here: {type(error).__name__}: {error}", flush=True)
        sys.exit(0)


def load_plugins(engine: str) -> None:
    """Let the engine find and load its plugins."""
    module, function = LOADERS[engine]
    getattr(needed(module), function)()
