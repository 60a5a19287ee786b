# SPDX-License-Identifier: MIT
"""Kernels that call NVSHMEM: declarations, the path of the device library, initialization of a kernel's module."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from tilelang_core import modules
from tilescale.backends.tilelang.headers import header
from tilescale.comm.heap import SymmetricHeap
from tilescale.errors import DependencyError, Location, UsageError

IMPL = "nvshmem"
"""NVSHMEM's name in `impl=`, TILESCALE_HEAP and kernels' lists of libraries."""

INCLUDE = "#include <nvshmem.h>"
LIBRARY = "libnvshmem_device.a"
PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")

STATE = b"nvshmemi_device_state_d"
"""The device library's state: a symbol of every module that it is linked into."""


@cache
def declarations() -> str:
    """Declarations in a kernel's text, with NVSHMEM's version, which nothing else adds to a cache key."""
    versions = [found.version for name in PACKAGES for found in metadata.distributions(name=name)]
    return f"// NVSHMEM {', '.join(versions) or 'is not installed'}\n{header('nvshmem.cuh')}\n"


@cache
def folder() -> Path:
    """The folder of NVSHMEM's `include` and `lib`. Raises DependencyError: its package is not installed, or has no
    device library."""
    try:
        spec = util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package `nvidia` at all
        spec = None
    for path in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        if (path / "include" / "nvshmem.h").exists() and (path / "lib" / LIBRARY).exists():
            return path
    raise DependencyError(
        f"NVSHMEM's headers and {LIBRARY} are not installed", hint=f"pip install {PACKAGES[0]} nvshmem4py-cu13"
    )


def compile_flags() -> list[str]:
    """nvcc's options for relocatable code, and for linking the device library into the cubin. Raises DependencyError:
    NVSHMEM is not installed."""
    paths = [f"-I{folder() / 'include'}", f"-L{folder() / 'lib'}"]
    return ["-rdc=true", "-dlink", *map(shlex.quote, paths), "-lnvshmem_device"]


def prepare(heap: SymmetricHeap, options: dict[str, Any], where: Location | None) -> None:
    """Prepare for kernels that call NVSHMEM: from now on they are linked, and their modules initialized.

    Raises:
        UsageError: the heap is not NVSHMEM's, or the execution backend is not TVM's.
        DependencyError: NVSHMEM is not installed.
    """
    if heap.provider != IMPL:
        raise UsageError(
            f"impl={IMPL!r} reaches tensors of NVSHMEM's heap only, and the heap of this job is of {heap.provider}",
            hint=f"set TILESCALE_HEAP={IMPL} on all ranks",
            where=where,
        )
    backend = options.get("execution_backend")
    if backend not in (None, "auto", "tvm_ffi"):
        raise UsageError(
            f"impl={IMPL!r} with execution_backend={backend!r}", hint="leave execution_backend out", where=where
        )
    modules.compile_with(INCLUDE, compile_flags())
    modules.on_load(_start)


def _start(module: int) -> None:
    """Initialize a module's copy of the device library with the job's state; modules without a copy are ignored."""
    from cuda.bindings import driver

    found, _, _ = driver.cuModuleGetGlobal(driver.CUmodule(module), STATE)
    if found == driver.CUresult.CUDA_SUCCESS:
        import nvshmem.bindings.nvshmem as bindings

        bindings.cumodule_init(module)


def started(kernel: Callable[..., Any], where: Location | None) -> Callable[..., Any]:
    """A kernel that runs only after its module has been initialized. Raises UsageError: when it is called: TileLang ran
    a kernel before the hook for modules was installed."""

    def run(*args: Any) -> Any:
        # The barrier at a program's entry is a kernel, so a module has been loaded by now.
        if not modules.is_notified():
            raise UsageError(
                "NVSHMEM cannot be started in this kernel: TileLang ran another kernel before tilescale was imported",
                hint="import tilescale before the first TileLang kernel runs",
                where=where,
            )
        return kernel(*args)

    return run
