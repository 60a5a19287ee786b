# SPDX-License-Identifier: MIT
"""Host libraries of kernels, compiled as the C that they are.

Why: TileLang gives the host code of a kernel and its binary, an array of bytes, to the compiler of C++ if there is one.
It takes twice as long as that of C: 0.3 s more at the end of each compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilelang.jit.adapter.kernel_cache import TVMFFIKernelCache
from tvm.contrib import cc


@contextlib.contextmanager
def compiling_as_c() -> Iterator[None]:
    """Within the block the gcc next to the g++ that TileLang finds makes libraries of host code in C."""
    stock, compiler = TVMFFIKernelCache._get_export_kwargs, Path(cc.get_cc() or "")
    compiler = compiler.with_name("gcc") if compiler.name == "g++" else compiler

    def options(kernel: Any) -> dict[str, Any]:
        host = getattr(getattr(kernel, "artifact", None), "target_host", None)
        is_c = host is not None and host.kind.name == "c" and compiler.is_file()
        return stock(kernel) or ({"cc": str(compiler)} if is_c else {})

    TVMFFIKernelCache._get_export_kwargs = staticmethod(options)
    try:
        yield
    finally:
        TVMFFIKernelCache._get_export_kwargs = staticmethod(stock)
