# SPDX-License-Identifier: MIT
"""CUDA modules of other libraries' kernels: options to compile them, and a callback for every module that is loaded.

A kernel, or a process, that uses neither is unaffected. Functions that were registered before are still called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tilelang.transform import PassConfigKey

COMPILE = "tilelang_callback_cuda_compile"
"""Called with text, target and pass settings; returns the binary."""

LOADED = "runtime.nvshmem.cumodule_init"
"""Called with a module (CUmodule) when TVM's runtime has loaded it. Looked up at the first load of the process, never
again, which is why ours is registered when this package is imported."""

_FLAGS = PassConfigKey.TL_DEVICE_COMPILE_FLAGS.value

_options: dict[str, tuple[str, ...]] = {}
_listeners: list[Callable[[int], None]] = []
_loads = 0


def compile_with(marker: str, flags: Sequence[str]) -> None:
    """From now on compile texts that contain `marker` with more options of nvcc, written as for a shell."""
    if not _options:
        earlier = tvm_ffi.get_global_func(COMPILE)

        def compile_text(text: str, target: Any, settings: Any = None) -> Any:
            added = [flag for marker, flags in _options.items() if marker in text for flag in flags]
            if not added:
                return earlier(text, target, settings)
            return earlier(text, target, with_flags(settings, added))

        tvm_ffi.register_global_func(COMPILE, compile_text, override=True)
    _options[marker] = tuple(flags)


def with_flags(settings: Mapping[str, Any] | None, flags: Sequence[str]) -> dict[str, Any]:
    """Pass settings with more options of nvcc."""
    given = dict(settings or {})
    own = given.get(_FLAGS) or []
    return {**given, _FLAGS: [*([own] if isinstance(own, str) else own), *flags]} if flags else given


def install() -> None:
    """Install the callback for loaded modules."""
    earlier = tvm_ffi.get_global_func(LOADED, allow_missing=True)

    def loaded(module: Any) -> None:
        global _loads
        _loads += 1
        if earlier is not None:
            earlier(module)
        for listener in _listeners:
            listener(module.value)

    tvm_ffi.register_global_func(LOADED, loaded, override=True)


def on_load(listener: Callable[[int], None]) -> None:
    """From now on call `listener` with the handle (CUmodule) of each module, once, before its first kernel runs."""
    if listener not in _listeners:
        _listeners.append(listener)


def is_notified() -> bool:
    """Whether TileLang has announced a module; if it has not when a kernel runs, it never will."""
    return _loads > 0
