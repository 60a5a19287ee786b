# SPDX-License-Identifier: MIT
"""Plugins of serving engines, which load them in each process by entry points of this package.

Both replace the operators of `torch.ops.symm_mem` (`symm_mem.py`), and the engine's all-reduce by `Communicator`.
`VLLM_PLUGINS` and `SGLANG_PLUGINS`, the engines' variables, name the plugins to load; if unset, all are loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tilescale.ops.communicator import Communicator
from tilescale.ops.symm_mem import install

VLLM = "vllm.distributed.device_communicators.custom_all_reduce"
SGLANG = "sglang.srt.distributed.device_communicators.custom_all_reduce"


def vllm() -> None:
    """The plugin of `vllm.general_plugins`. Loading it twice changes nothing."""
    install()
    module = import_module(VLLM)
    module.CustomAllreduce = in_place_of(module.CustomAllreduce)


def sglang() -> None:
    """The plugin of `sglang.srt.plugins`; the engine puts the hook there once all plugins are loaded."""
    install()
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(f"{SGLANG}.dispatch_custom_allreduce", _dispatch, hooks.HookType.AROUND)


def _dispatch(original: Any, *args: Any, **kwargs: Any) -> Any:
    return in_place_of(original(*args, **kwargs))


def in_place_of(theirs: Any) -> Any:
    """The communicator as a class of the engine's own kind, with what else there is in it; something else as it is."""
    if not isinstance(theirs, type) or issubclass(theirs, Communicator):
        return theirs
    return type(theirs.__name__, (Communicator, theirs), {"__module__": __name__})
