# SPDX-License-Identifier: MIT
"""Host libraries of kernels are compiled as C, by the gcc next to the compiler that TileLang finds; they include the
binary of the kernel from a file."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tilelang  # noqa: F401 - it brings tvm
from tilelang.jit.adapter.kernel_cache import TVMFFIKernelCache
from tvm.contrib import cc

from tilelang_core import host_libraries
from tilelang_core.host_libraries import compiling_as_c, including


def options(host: str) -> dict[str, Any]:
    """Options of the library of a kernel whose host code is for this kind of target."""
    target = SimpleNamespace(kind=SimpleNamespace(name=host))
    return TVMFFIKernelCache._get_export_kwargs(SimpleNamespace(artifact=SimpleNamespace(target_host=target)))


@pytest.mark.parametrize(("found", "taken"), [("g++", "gcc"), ("gcc", "gcc"), ("clang++", "clang++")])
def test_c_is_not_compiled_as_another_language(found: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / taken).touch()
    monkeypatch.setattr(cc, "get_cc", lambda: str(tmp_path / found))
    before = options("c")
    with compiling_as_c():
        assert options("c") == {"cc": str(tmp_path / taken), "fpack_imports": including}
        assert options("llvm") == before
    assert options("c") == before


@pytest.mark.parametrize("found", [None, "/nowhere/g++"])
def test_without_gcc_it_stays(found: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cc, "get_cc", lambda: found)
    before = options("c")
    with compiling_as_c():
        assert options("c") == before


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_library_has_the_bytes_that_tvm_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed = np.random.default_rng(1).integers(0, 256, 70_001, np.uint8)
    tensor = SimpleNamespace(numpy=lambda: packed)
    pack = {"runtime.ModulePackImportsToTensor": lambda module: tensor}
    monkeypatch.setattr(host_libraries.tvm_ffi, "get_global_func", pack.get)
    library = tmp_path / "a library.so"
    subprocess.run(["gcc", "-shared", "-o", library, including(None, False, "", str(tmp_path))], check=True)
    found = (ctypes.c_ubyte * packed.size).in_dll(ctypes.CDLL(str(library)), "__tvm_ffi__library_bin")
    assert bytes(found) == packed.tobytes()
