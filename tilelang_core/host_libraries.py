# SPDX-License-Identifier: MIT
"""Host libraries of kernels, compiled as the C that they are, with the kernel's binary included as a file.

Why: TileLang gives the host code of a kernel and its binary, an array of bytes, to the compiler of C++ if there is one.
It takes twice as long as that of C, and three quarters of the rest go into an array of 200,000 numbers: half a second
at the end of each compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm_ffi
from tilelang.jit.adapter.kernel_cache import TVMFFIKernelCache
from tvm.contrib import cc

_BINARY = "__tvm_ffi__library_bin"
"""The symbol under which TVM's runtime looks for the modules that the host code imports."""

_INCLUDED = """\
.section .rodata
.globl {symbol}
.type {symbol}, %object
.balign 32
{symbol}:
.incbin "{path}"
.size {symbol}, . - {symbol}
.section .note.GNU-stack, "", %progbits
"""


@contextlib.contextmanager
def compiling_as_c() -> Iterator[None]:
    """Within the block the gcc next to the g++ that TileLang finds makes libraries of host code in C."""
    stock, compiler = TVMFFIKernelCache._get_export_kwargs, Path(cc.get_cc() or "")
    compiler = compiler.with_name("gcc") if compiler.name == "g++" else compiler

    def options(kernel: Any) -> dict[str, Any]:
        host = getattr(getattr(kernel, "artifact", None), "target_host", None)
        is_c = host is not None and host.kind.name == "c" and compiler.is_file()
        return stock(kernel) or ({"cc": str(compiler), "fpack_imports": including} if is_c else {})

    TVMFFIKernelCache._get_export_kwargs = staticmethod(options)
    try:
        yield
    finally:
        TVMFFIKernelCache._get_export_kwargs = staticmethod(stock)


def including(module: Any, is_system: bool, prefix: str, folder: str) -> str:
    """Path of an assembler file with the modules that a host module imports, as TVM passes it to the compiler."""
    packed = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module)
    binary, source = (Path(folder) / f"imports.{kind}" for kind in ("bin", "s"))
    binary.write_bytes(packed.numpy().tobytes())
    source.write_text(_INCLUDED.format(symbol=f"{prefix}{_BINARY}", path=binary), encoding="utf-8")
    return str(source)
