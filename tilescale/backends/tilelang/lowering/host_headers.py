# SPDX-License-Identifier: MIT
"""Leave out the parts of the C++ library that TileLang's headers include for host code.

Why: CUTLASS includes streams, algorithms and exceptions, which device code does not call. nvcc takes a third of its
time for a GEMM to read them. Before: text that includes TileLang's headers. After: text that defines the include guards
of these parts of libstdc++ meanwhile, without TileLang's scans where it calls none. Other libraries, and releases of it
that were not tested, are read as before. The instructions are the same.
"""

from __future__ import annotations

import re

_TILELANG = "#include <tl_templates/cuda/"
_OWN = (
    "barrier.h", "cluster.h", "common.h", "copy.h", "copy_sm90.h", "cuda_bf16_fallbacks.cuh", "cuda_fp8.h", "debug.h",
    "instruction/wgmma.h", "intrin.h", "ldsm.h", "reduce.h", "scan.h", "threadblock_swizzle.h",
)  # fmt: skip
_CUDA = ("cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
_SUFFICIENT = {f"{_TILELANG}{name}>" for name in _OWN} | {f"#include <{name}>" for name in _CUDA}
"""Headers that compile without these parts."""

_READ = ("cmath", "cstdint", "cstring", "iosfwd", "limits", "type_traits", "utility")
_GUARDS = [f"_GLIBCXX_{name}" for name in "ALGORITHM FUNCTIONAL IOMANIP IOSTREAM MUTEX STDEXCEPT VECTOR".split()]
_IF = "#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11 && _GLIBCXX_RELEASE <= 13\n"
_BEGIN = "".join(f"#include <{name}>\n" for name in _READ) + _IF + "".join(
    f'#pragma push_macro("{name}")\n#undef {name}\n#define {name} 1\n' for name in _GUARDS
) + "#endif\n"  # fmt: skip
_END = f"\n{_IF}" + "".join(f'#pragma pop_macro("{name}")\n' for name in _GUARDS) + "#endif"

_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
_LIBRARY = re.compile(r"(?<!cuda::)\bstd::")
_SCANS, _SCAN = f"{_TILELANG}scan.h>\n", re.compile(r"\btl::(Cum|InclusiveScan|Scan)")


def without_host_headers(text: str) -> str:
    """A text without them. One with other headers, or with names of the library, stays as it is."""
    if _TILELANG not in text or _LIBRARY.search(text):
        return text
    if not _SUFFICIENT.issuperset(_INCLUDE.findall(text)):
        return text
    if not _SCAN.search(text):
        text = text.replace(_SCANS, "")
    begin, end = text.index(_TILELANG), text.index("\n", text.rindex(_TILELANG))
    return f"{text[:begin]}{_BEGIN}{text[begin:end]}{_END}{text[end:]}"
