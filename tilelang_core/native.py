# SPDX-License-Identifier: MIT
"""C sources for TVM-FFI: compiled once by the host's compiler, kept with TileLang's kernels, loaded."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from tilelang_core.compile import cache_folder
from tilelang_core.files import replacing

FOLDER = "native"
"""Folder of libraries in the cache."""

_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared")


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded source.

    Attributes:
        functions: those that take any values (`__tvm_ffi_<name>`), by name.
        plain: all functions, by name, as `ctypes` calls them.
    """

    functions: Any
    plain: ctypes.CDLL


def compiler() -> str | None:
    """The host's C compiler; None if there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def library(text: str) -> NativeLibrary:
    """A C source, compiled where the cache does not have it. Raises OSError, subprocess.CalledProcessError: there is no
    compiler, or it fails."""
    headers = libinfo.find_include_path(), libinfo.find_dlpack_include_path()
    name = hashlib.sha256(repr((text, tvm_ffi.__version__, _FLAGS)).encode()).hexdigest()[:24]
    path = cache_folder() / FOLDER / f"{name}.so"
    if not path.exists():
        _compile(text, headers, path)
    return NativeLibrary(tvm_ffi.load_module(str(path)), ctypes.CDLL(str(path)))


def _compile(text: str, headers: tuple[str, ...], path: Path) -> None:
    """Compile into `path`; other ranks and threads may do the same."""
    command = [compiler() or "cc", *_FLAGS, *(f"-I{folder}" for folder in headers), "-x", "c", "-", "-o"]
    with replacing(path) as made:
        subprocess.run([*command, str(made)], input=text.encode(), check=True, capture_output=True, timeout=60)
