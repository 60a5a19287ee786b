# SPDX-License-Identifier: MIT
"""Variables of the generated text that are not named by words of C++ and CUDA.

`new = T.alloc_shared(...)`: stock TileLang 0.1.15 writes `half_t new[]`, which nvcc rejects. Buffers keep the user's
names, in which errors speak of them; the variables of their memory get others.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tilelang.language.eager.builder import Builder
from tvm import tirx

from tilelang_core.ir import walk

_RESERVED = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool catch char16_t char32_t char8_t co_await co_return co_yield compl
    concept const const_cast consteval constexpr constinit decltype delete dynamic_cast explicit export friend inline
    mutable namespace new noexcept not_eq nullptr operator or_eq private protected public reinterpret_cast requires
    signed sizeof static static_assert static_cast template this thread_local throw try typeid typename using virtual
    volatile wchar_t xor xor_eq blockDim blockIdx gridDim threadIdx warpSize
    """.split()
)
"""Keywords that TVM's generator of C does not avoid itself, and the variables of CUDA."""

_OWN = "_tilelang_core_names"


def install() -> None:
    """Rename such variables at the end of a trace; a second call does nothing."""
    stock = Builder.get
    if getattr(stock, _OWN, False):
        return

    def get(self: Builder) -> tirx.PrimFunc:
        return with_valid_names(stock(self))

    setattr(get, _OWN, True)
    Builder.get = get


def with_valid_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same function, its variables renamed in place: to be called before the function is used."""
    rename = tvm_ffi.get_global_func("script.ir_builder.IRBuilderName")
    for var in _variables(func):
        if var.name in _RESERVED:
            rename(f"{var.name}_", var)
    return func


def _variables(func: tirx.PrimFunc) -> list[tirx.Var]:
    found = [var for var in func.params if var.dtype != "handle"]
    found += [buffer.data for buffer in func.buffer_map.values()]

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For):
            found.append(node.loop_var)
        elif isinstance(node, tirx.Bind):
            found.append(node.var)
        elif isinstance(node, tirx.SBlock):
            found.extend(buffer.data for buffer in node.alloc_buffers)

    walk(func.body, visit)
    return found
