# SPDX-License-Identifier: MIT
"""The warpgroup instructions that a text calls, in place of TileLang's header of all.

Why: nvcc takes a quarter of its time for a GEMM to read the header's thousands of shapes. Before: text that includes
it. After: text with a function for each shape that it calls, of the instruction `wgmma.mma_async` (PTX ISA, section
"Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
"""

from __future__ import annotations

import re

_HEADER = "#include <tl_templates/cuda/instruction/wgmma.h>\n"
_ANY_CALL = "tl::wgmma_"
_CALL = re.compile(
    r"tl::wgmma_ss<tl::DataType::(?P<a>\w+), tl::DataType::(?P<b>\w+), tl::DataType::kFloat32, 64, (?P<n>\d+), "
    r"(?P<k>\d+), (?P<transA>false|true), (?P<transB>false|true), (?P<scales>-?1, -?1)>"
)
_PTX = {"kBFloat16": "bf16", "kFloat16": "f16", "kFloat8_e4m3": "e4m3", "kFloat8_e5m2": "e5m2"}
"""Types of operands, and their names in PTX."""

_TRANSPOSES = ("bf16", "f16")
"""Types of operands that may be transposed in shared memory."""

_DECLARED = """#include <tl_templates/cuda/common.h>
namespace tilescale {
template <tl::DataType A, tl::DataType B, tl::DataType C, int M, int N, int K, bool transA, bool transB, int, int>
TL_DEVICE void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool adds);
"""


def called_wgmmas(text: str) -> str:
    """A text that defines the shapes of its calls.

    With a call other than of sums in float32 of tiles in shared memory it keeps the header.
    """
    calls = {found[0]: found for found in _CALL.finditer(text)}
    known = all(found["a"] in _PTX and found["b"] in _PTX for found in calls.values())
    if not known or text.count(_ANY_CALL) != sum(1 for _ in _CALL.finditer(text)):
        return text
    own = _DECLARED + "".join(map(_defined, calls.values())) + "}  // namespace tilescale\n"
    return text.replace(_HEADER, own).replace("tl::wgmma_ss<", "tilescale::wgmma_ss<")


def _defined(call: re.Match[str]) -> str:
    a, b, sums = _PTX[call["a"]], _PTX[call["b"]], int(call["n"]) // 2
    given = [f'"n"({value})' for value in call["scales"].split(", ")]
    if a in _TRANSPOSES:
        given += [f'"n"({value})' for value in (call["transA"], call["transB"])]
    flags = ", ".join(f"%{sums + 3 + i}" for i in range(len(given)))
    once = re.sub(r"\W+", "_", call[0].replace("-", "minus")).upper()  # texts of several grids may be in one file
    return f"""#ifndef TILESCALE_{once}
#define TILESCALE_{once}
template <>
TL_DEVICE void {call[0].removeprefix("tl::")}(uint64_t a, uint64_t b, uint32_t* c, bool adds) {{
  float* sums = reinterpret_cast<float*>(c);
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{call["n"]}k{call["k"]}.f32.{a}.{b} "
      "{{{", ".join(f"%{i}" for i in range(sums))}}}, %{sums}, %{sums + 1}, p, {flags};\\n}}\\n"
      : {", ".join(f'"+f"(sums[{i}])' for i in range(sums))}
      : "l"(a), "l"(b), "r"(adds ? 1 : 0), {", ".join(given)});
}}
#endif
"""
