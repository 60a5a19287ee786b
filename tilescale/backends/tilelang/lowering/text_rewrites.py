# SPDX-License-Identifier: MIT
"""Rewrites of the text that stock TileLang generates, before nvcc compiles it."""

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
    """Define the warpgroup instructions that a text calls, in place of TileLang's header of all.

    Why: nvcc takes a quarter of its time for a GEMM to read the header's thousands of shapes. The functions are of the
    instruction `wgmma.mma_async` (PTX ISA, section "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
    Instructions"). With a call other than of sums in float32 of tiles in shared memory the text keeps the header.
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


_PARAMETERS = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?\w+\(([^)]*)\) \{")
_POINTER = re.compile(r"\* *(?:__restrict__ *)?(\w+)$")
_ARRAY = re.compile(r"^ +\w+ (\w+)\[\d+\];$", re.MULTILINE)
_COPY = re.compile(r"^( *)\*\(((?:u?int|float)[24])\*\)\(((\w+) \+ .*)\) = (\*\(\2\*\)\((\w+) \+ .*\));$", re.MULTILINE)


def whole_vectors(text: str) -> str:
    """Keep vector stores from registers to tensors whole: copies of 8 or 16 bytes are one store each.

    Why: nvcc splits a vector that is copied out of an array in registers, and merges it again only sometimes: 16 bytes
    then become four stores of 4, each of a quarter of a warp's store. The store is a function of headers/memory.cuh.
    """
    found = (_POINTER.search(one) for kernel in _PARAMETERS.findall(text) for one in kernel.split(","))
    tensors = {pointer[1] for pointer in found if pointer is not None}
    arrays = set(_ARRAY.findall(text))

    def stored(copy: re.Match[str]) -> str:
        indent, vector, target, tensor, value, array = copy.groups()
        is_copied = tensor in tensors and array in arrays
        return f"{indent}tilescale::store_whole(({vector}*)({target}), {value});" if is_copied else copy[0]

    return _COPY.sub(stored, text)


_LEAVES_SOME = re.compile(r"tl::warpgroup_wait<[1-9]\d*>\(\);")


def wait_for_gemms(text: str) -> str:
    """Wait for every GEMM in its iteration.

    Why: with `wg_wait` stock TileLang leaves a GEMM in flight while the tiles of its iteration go back to the producer,
    which overwrites them.
    """
    return _LEAVES_SOME.sub("tl::warpgroup_wait<0>();", text)


_WARP = 32
_ELECTED = re.compile(r"if \(tl::tl_shuffle_elect<(\d+)>\(\)\) \{")
_STAGE_WAIT = re.compile(r"\w+\[.*\]\.wait\(.*\);")
_OF_PRODUCER = re.compile(
    r"(?:\w+ )?\w+(?: = .*)?;|\w+\[0\] = \(\w+\[0\] \+ 1\);|if \(.*\) \{|\} else \{|\}|tilescale::wait_by_producer<.*"
)
"""Other statements of a producer's loop: scalars, counters of phases, and waits for flags by its first warp alone."""


def wait_in_loading_warps(text: str) -> str:
    """Let the warp of a producer that loads wait for a stage's mbarrier, and no other one.

    Why: TileLang lets all warps of a producer wait, which see phases by parity alone. One that falls two phases behind
    the loads waits for a phase that has long passed (parity aliasing): where the block synchronizes after the loop, or
    the loop ends, it never comes. Loops with other statements, such as loads by all threads, stay as they are.
    """
    lines = text.split("\n")
    for number, line in enumerate(lines):
        elected = _ELECTED.fullmatch(line.strip())
        if elected and int(elected[1]) > _WARP:
            for at in _waits_of_producer(lines, number):
                depth, stripped = _depth(lines[at]), lines[at].strip()
                guard = f"if (((int)threadIdx.x) % {elected[1]} < {_WARP}) "
                lines[at] = " " * depth + (stripped if stripped.startswith("if (") else guard + stripped)
    return "\n".join(lines)


def _waits_of_producer(lines: list[str], elected: int) -> list[int]:
    """The waits for stages in the loop around a line, by their numbers; none unless it has loads of elected threads
    alone."""
    depth, found = _depth(lines[elected]), []
    begin = next(at for at in range(elected, -1, -1) if _depth(lines[at]) < depth)
    at, inside = begin + 1, False  # of an elected thread
    while _depth(lines[at]) >= depth:
        stripped = lines[at].strip()
        if inside:
            inside = _depth(lines[at]) > depth
        elif _ELECTED.fullmatch(stripped):
            inside = True
        elif _STAGE_WAIT.fullmatch(stripped):
            found.append(at)
        elif not _OF_PRODUCER.fullmatch(stripped):
            return []
        at += 1
    return found if lines[begin].strip().startswith("for (") else []


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


_FENCE = re.compile(r"(tl::warpgroup_fence_operand\(reinterpret_cast<float\*>\((\w+) \+ (\d+)\), )(\d+)(?=\);)")
_FLOATS = re.compile(r"^ +float (\w+)\[(\d+)\];$", re.MULTILINE)


def fence_own_sums(text: str) -> str:
    """Order the registers that a thread has of a GEMM's sums, and no others.

    Why: TileLang counts the sums of all warpgroups that share the rows of a tile. Registers beyond the array are not
    the thread's, and the statements for them are 4 % of the work of nvcc's compiler for a GEMM.
    """
    sizes: dict[str, int] = {}
    for name, size in _FLOATS.findall(text):
        sizes[name] = max(int(size), sizes.get(name, 0))

    def fenced(call: re.Match[str]) -> str:
        begin, name, offset, count = call.groups()
        return f"{begin}{min(int(count), sizes[name] - int(offset))}" if name in sizes else call[0]

    return _FENCE.sub(fenced, text)


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
_LINE = re.compile(rf"^{_TILELANG}.*(\n#endif)?$", re.MULTILINE)
"""A line that includes a header of TileLang, with the end of the condition that it is under."""
_LIBRARY = re.compile(r"(?<!cuda::)\bstd::")
_SCANS, _SCAN = f"{_TILELANG}scan.h>\n", re.compile(r"\btl::(Cum|InclusiveScan|Scan)")

_INTRIN = f"{_TILELANG}intrin.h>\n"
_CLUSTER = "#include <cute/arch/cluster_sm90.hpp>"
_ARCHITECTURES = "__CUDA_ARCH_LIST__"
_SYNCHRONIZED = f"""{_TILELANG}common.h>
#if {_ARCHITECTURES} >= 900 && !defined(TILESCALE_WGMMA)
#define TILESCALE_WGMMA
{_CLUSTER}
namespace cute {{
TL_DEVICE void warpgroup_arrive() {{ asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory"); }}
TL_DEVICE void warpgroup_commit_batch() {{ asm volatile("wgmma.commit_group.sync.aligned;\\n" ::: "memory"); }}
template <int N>
TL_DEVICE void warpgroup_wait() {{ asm volatile("wgmma.wait_group.sync.aligned %0;\\n" ::"n"(N) : "memory"); }}
}}  // namespace cute
#endif
#pragma push_macro("{_ARCHITECTURES}")
#undef {_ARCHITECTURES}
#define {_ARCHITECTURES} 0
{_INTRIN}#pragma pop_macro("{_ARCHITECTURES}")
"""
"""intrin.h, which includes headers of CuTe from compute capability 9.0 on."""


def without_wgmma_shapes(text: str) -> str:
    """Define the synchronization of warpgroup instructions, in place of CuTe's header of all their shapes.

    Why: intrin.h calls three functions of that header, which is a fifth of what nvcc reads for a GEMM. The instructions
    are the same. A text with other names of CuTe, or with headers that may include this one, stays as it is.
    """
    if "cute::" in text or _HEADER in text or not _SUFFICIENT.issuperset(_INCLUDE.findall(text)):
        return text
    return text.replace(_INTRIN, _SYNCHRONIZED)


def without_host_headers(text: str) -> str:
    """Leave out the parts of the C++ library that TileLang's headers include for host code.

    Why: CUTLASS includes streams, algorithms and exceptions, which device code does not call. nvcc takes a third of its
    time for a GEMM to read them. The text defines the include guards of these parts of libstdc++ meanwhile, and has
    TileLang's scans only where it calls one. Other libraries, and releases of it that were not tested, are read as
    before; a text with other headers, or with names of the library, stays as it is. The instructions are the same.
    """
    if _TILELANG not in text or _LIBRARY.search(text):
        return text
    if not (_SUFFICIENT | {_CLUSTER}).issuperset(_INCLUDE.findall(text)):
        return text
    if not _SCAN.search(text):
        text = text.replace(_SCANS, "")
    begin, end = text.index(_TILELANG), [*_LINE.finditer(text)][-1].end()
    return f"{text[:begin]}{_BEGIN}{text[begin:end]}{_END}{text[end:]}"
