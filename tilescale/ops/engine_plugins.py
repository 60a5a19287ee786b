# SPDX-License-Identifier: MIT
"""Replacements made by the plugins of serving engines (`tilescale/plugins.py`).

That is the engine's custom all-reduce, by `Communicator`, and the operators of `torch.ops.symm_mem` (`symm_mem.py`).
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import Any

import tilescale
from tilescale.errors import UsageError
from tilescale.ops.communicator import Communicator
from tilescale.ops.group import rank_of, size_of
from tilescale.ops.symm_mem import install

DEVICE_COMMUNICATORS = "distributed.device_communicators.custom_all_reduce"


def vllm() -> None:
    """Put the communicator in the place of vLLM's `CustomAllreduce`; twice changes nothing.

    Raises UsageError if this vLLM has none.
    """
    module = _module_with("CustomAllreduce", f"vllm.{DEVICE_COMMUNICATORS}")
    install()
    module.CustomAllreduce = VllmCommunicator  # type: ignore[attr-defined]


def sglang() -> None:
    """Hook SGLang's `dispatch_custom_allreduce`, so that it gives the communicator; SGLang applies hooks after plugins.

    Raises UsageError if this SGLang has no such function.
    """
    module = _module_with("dispatch_custom_allreduce", f"sglang.srt.{DEVICE_COMMUNICATORS}")
    install()
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        f"{module.__name__}.dispatch_custom_allreduce", _dispatch_custom_allreduce, hooks.HookType.REPLACE
    )


def _dispatch_custom_allreduce(group: Any, device: Any) -> type[Communicator]:
    return SglangCommunicator


def _module_with(slot: str, name: str) -> ModuleType:
    """The engine's module that has the replaced name."""
    try:
        module = import_module(name)
        getattr(module, slot)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"TILESCALE_PLUGIN is set, but there is no {slot} in {name}: {error}",
            hint="unset TILESCALE_PLUGIN, or install a version of the engine that docs/in-*.md names",
        ) from error
    return module


class _Logged(Communicator):
    """A communicator whose group's first rank reports itself in the engine's log."""

    engine: str

    def __init__(self, group: Any, device: Any, **options: Any):
        super().__init__(group, device, **options)
        if rank_of(self.group) == 0:
            what = "no collective, as it spans nodes" if self.disabled else "all-reduce, all-gather, reduce-scatter"
            line = "TileScale %s, for a group of %d ranks: %s; for all groups: torch.ops.symm_mem.fused_*"
            logging.getLogger(f"{self.engine}.tilescale").info(line, tilescale.__version__, size_of(self.group), what)


class VllmCommunicator(_Logged):
    """The communicator as vLLM makes it."""

    engine = "vllm"

    # Models ask before they use kernels of vLLM's own, which work on the buffers of its class.
    fully_connected = False
    mnnvl_lamport_ag_multicast_ptr = 0


class SglangCommunicator(_Logged):
    """The communicator as SGLang makes it."""

    engine = "sglang"
