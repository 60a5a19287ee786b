# SPDX-License-Identifier: MIT
"""Copies by NVSHMEM without a GPU: generated text, how it is linked and started, what is declined."""

import ctypes
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi

import tilescale
import tilescale.language as T
from tests.cuda import nvshmem_programs as programs
from tests.cuda.support import bodies, lowered, notes, source
from tilelang_core import compile as stock
from tilelang_core import modules
from tilescale.backends.tilelang import nvshmem_link
from tilescale.cost.choose import TileTransfer, mechanism
from tilescale.errors import DependencyError, UnsupportedError, UsageError
from tilescale.hda import Machine

TARGET = {"kind": "cuda", "arch": "sm_90a"}

PROGRAMS = {"ring": programs.ring, "tails": programs.tails, "gets": programs.gets, "tensors": programs.tensors}


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_of_programs(name: str, golden):
    golden(f"nvshmem/{name}", bodies(source(PROGRAMS[name]())))


def test_text_declares_what_it_calls_and_only_then():
    text = source(programs.ring())
    order = [text.index(part) for part in ("namespace tilescale", "// NVSHMEM", nvshmem_link.INCLUDE, "__global__")]
    assert order == sorted(order)

    @T.prim_func
    def without(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=T.ALL, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[0:32], X[32:64], dst=(rank + 1) % size)

    assert "nvshmem" not in source(without).lower()


def test_tensors_that_peers_reach_are_known():
    """They have to be symmetric, though the kernel takes this device's address only."""
    (kernel,) = lowered(programs.ring()).kernels
    assert kernel.reached == {1, 3} and kernel.libraries == {"nvshmem"}


def test_notes_say_what_moves_the_tile():
    assert notes(programs.ring()) == ["T.copy(tile, Y, dst=): nvshmem (asked for, through a workspace)"]


def test_a_device_of_another_node_is_a_number_too():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def put(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
            with T.Kernel(node=2, device=4, block=1, threads=64):
                with T.Scale("block"), T.Scale("node") as (rank, size):
                    T.copy(X, Y, dst=(rank + 1) % size, impl="nvshmem")

    text = lowered(put, "h200-sxm-8x4").source({"target": TARGET})
    assert "((node_rank + 1) & 1) * 4) + device_rank" in bodies(text)


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_mean_what_other_copies_mean(ranks: int):
    """The emulator ignores mechanisms: it is the GPU check's reference."""
    x, y, z = (torch.randn(64, 64).bfloat16() for _ in range(3))
    args = [[x * (r + 1), y.clone(), z.clone(), torch.zeros(4, dtype=torch.uint64), 1] for r in range(ranks)]
    tilescale.emulate(programs.ring(), args)
    for r, (_, got, result, flags, _) in enumerate(args):
        assert (
            torch.equal(got, x * ((r - 1) % ranks + 1)) and torch.equal(result, got + 1) and flags.tolist() == [1] * 4
        )


# -- declined ----------------------------------------------------------------------------------------------------------


def test_extents_must_be_known():
    @T.prim_func
    def put(X: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(device=T.ALL, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[0:n], X[n : 2 * n], dst=(rank + 1) % size, impl="nvshmem")

    with pytest.raises(UnsupportedError, match="symbolic"):
        source(put)


def test_a_machine_offers_it_or_not():
    with pytest.raises(UsageError, match="nvshmem"), tilescale.use_machine("mi300x-8"):
        programs.ring()


@pytest.mark.parametrize("name", Machine.names())
def test_no_machine_takes_it_unasked(name: str):
    for network in Machine.load(name).networks:
        way = network.mechanism("nvshmem")
        if way is None:
            continue
        wanted = TileTransfer("put", "shared", 1 << 20, 2)
        assert mechanism(network, wanted).name != "nvshmem"
        alone = replace(network, mechanisms=(way,))
        with pytest.raises(UnsupportedError, match="on request"):
            mechanism(alone, wanted)
        assert mechanism(alone, wanted, "nvshmem").name == "nvshmem"


def test_the_heap_must_be_of_nvshmem():
    with pytest.raises(UsageError, match="cuda_vmm(.|\n)*TILESCALE_HEAP=nvshmem"):
        nvshmem_link.prepare(SimpleNamespace(provider="cuda_vmm"), {}, None)


def test_the_execution_backend_must_be_tvms():
    with pytest.raises(UsageError, match="cython"):
        nvshmem_link.prepare(SimpleNamespace(provider="nvshmem"), {"execution_backend": "cython"}, None)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvshmem_link.util, "find_spec", lambda name: None)
    nvshmem_link.folder.cache_clear()
    with pytest.raises(DependencyError, match="pip install nvidia-nvshmem-cu13"):
        nvshmem_link.compile_flags()


# -- hooks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """Inputs of the compiler that was registered before: (text, settings) of each call."""
    calls: list[tuple[str, dict[str, Any]]] = []
    before = tvm_ffi.get_global_func(modules.COMPILE)

    def compile_text(text: str, target: Any, settings: Any = None) -> bytes:
        calls.append(
            (text, {k: list(v) if not isinstance(v, str | bool) else v for k, v in dict(settings or {}).items()})
        )
        return b"binary"

    monkeypatch.setattr(modules, "_options", {})
    tvm_ffi.register_global_func(modules.COMPILE, compile_text, override=True)
    yield calls
    tvm_ffi.register_global_func(modules.COMPILE, before, override=True)


def test_only_marked_texts_are_compiled_differently(compiled: list):
    modules.compile_with("<marker.h>", ["-rdc=true", "-lx"])
    modules.compile_with("<marker.h>", ["-rdc=true", "-lx"])
    settings = {"tl.enable_fast_math": True, "tl.device_compile_flags": "-g"}
    assert stock.device_code("plain", "c", settings) == b"binary"
    stock.device_code("plain", "c", settings, ["-lineinfo"])
    stock.device_code("#include <marker.h>", "c")
    stock.device_code("#include <marker.h>", "c", settings)
    flags = "tl.device_compile_flags"
    assert compiled == [
        ("plain", settings),
        ("plain", {"tl.enable_fast_math": True, flags: ["-g", "-lineinfo"]}),
        ("#include <marker.h>", {flags: ["-rdc=true", "-lx"]}),
        ("#include <marker.h>", {"tl.enable_fast_math": True, flags: ["-g", "-rdc=true", "-lx"]}),
    ]


def test_nothing_is_registered_before_it_is_needed(compiled: list):
    registered = tvm_ffi.get_global_func(modules.COMPILE)
    source(programs.ring())
    assert tvm_ffi.get_global_func(modules.COMPILE).same_as(registered)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch):
    """A load of a module, as TVM's runtime announces it."""
    monkeypatch.setattr(modules, "_listeners", [])
    monkeypatch.setattr(modules, "_loads", 0)
    before = tvm_ffi.get_global_func(modules.LOADED)
    yield lambda handle: tvm_ffi.get_global_func(modules.LOADED)(ctypes.c_void_p(handle))
    tvm_ffi.register_global_func(modules.LOADED, before, override=True)


def test_listeners_are_told_of_modules(loading: Any):
    heard: list[int] = []
    loading(1)
    modules.on_load(heard.append)
    modules.on_load(heard.append)
    loading(2)
    assert heard == [2] and modules.is_notified()


def test_what_was_registered_before_is_told_too(loading: Any):
    earlier: list[int] = []
    tvm_ffi.register_global_func(modules.LOADED, lambda module: earlier.append(module.value), override=True)
    modules.install()
    heard: list[int] = []
    modules.on_load(heard.append)
    loading(3)
    assert earlier == heard == [3]


def test_a_kernel_that_cannot_be_started_does_not_run(loading: Any):
    runs: list[int] = []
    kernel = nvshmem_link.started(runs.append, None)
    with pytest.raises(UsageError, match="import tilescale"):
        kernel(1)
    loading(1)
    kernel(2)
    assert runs == [2]


def _installed() -> bool:
    nvshmem_link.folder.cache_clear()
    try:
        return nvshmem_link.folder().exists()
    except DependencyError:
        return False


@pytest.mark.skipif(shutil.which("nvcc") is None or not _installed(), reason="nvcc or nvidia-nvshmem-cu13 is missing")
def test_the_device_library_is_linked():
    nvshmem_link.folder.cache_clear()
    modules.compile_with(nvshmem_link.INCLUDE, nvshmem_link.compile_flags())
    binary = stock.device_code(source(programs.ring()), TARGET)
    assert binary.startswith(b"\x7fELF") and nvshmem_link.STATE in binary and b"ring_of_puts_0_kernel" in binary
