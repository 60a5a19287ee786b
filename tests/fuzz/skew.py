# SPDX-License-Identifier: MIT
"""A rewrite of CUDA text for tests: warps are late at random, the same ones for the same text.

Threads of one kernel run nearly in step, so a barrier that is missing hardly ever shows. A delay in front of each
statement outside unrolled loops lets any warp lag behind any other one by more than the time of a store.
"""

import re
import zlib

_KERNEL = re.compile(r'^extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?\w+\([^;]*?\) \{$', re.MULTILINE)
_DELAY = """
// Of a quarter of all warps and statements: some thousand cycles; of a few, ten times as many.
static __device__ __forceinline__ void fuzz_delay_{seed}(unsigned statement) {{
  unsigned warp = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
  unsigned h = statement * 2654435761u ^ (warp + 1) * 2246822519u ^ (blockIdx.x + 1) * 3266489917u ^ {seed}u;
  h = (h ^ h >> 15) * 2246822519u;
  h = (h ^ h >> 13) * 3266489917u;
  h ^= h >> 16;
  if (h % 4 != 0) return;
  long long end = clock64() + (h % 64 == 0 ? 10 : 1) * (200 + (h >> 8) % 3000);
  while (clock64() < end) {{
  }}
}}

"""
_DECLARATION = re.compile(r"[\w:]+\*? \w+(\[\w+\])?( = |;)")
_NEVER = ("}", "else", "#", "case", "default", "//", '"', ":")


def skewed(text: str) -> str:
    """The text with delays, seeded by the text."""
    kernel = _KERNEL.search(text)
    if kernel is None:
        return text
    head = text.rfind("\n\n", 0, kernel.start()) + 1
    seed = zlib.crc32(text.encode())
    return text[:head] + _DELAY.format(seed=seed) + _delayed(text[head:], seed)


def _delayed(text: str, seed: int) -> str:
    lines: list[str] = []
    inside, unrolled, before = False, None, ""
    for number, line in enumerate(text.split("\n")):
        stripped, depth = line.strip(), len(line) - len(line.lstrip())
        if unrolled is not None and depth <= unrolled and not stripped.startswith(("for", "#")):
            unrolled = None
        if inside and unrolled is None:
            loop = stripped.startswith("#pragma unroll")
            if before.endswith((";", "{", "}")) and (loop or _is_statement(stripped)):
                lines.append(f"{line[:depth]}fuzz_delay_{seed}({number});")
            unrolled = depth if loop else None
        lines.append(line)
        inside, before = bool(_KERNEL.match(line)) or (inside and line != "}"), stripped
    return "\n".join(lines)


def _is_statement(line: str) -> bool:
    return bool(line) and not line.startswith(_NEVER) and not _DECLARATION.match(line)
