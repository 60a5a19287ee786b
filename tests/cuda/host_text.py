# SPDX-License-Identifier: MIT
"""Device functions compiled for the host: their signals and waits, in threads of this process."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent

SCOPE, VALUE = "(?:sys|gpu)", r"(static_cast<\w+>\(\w+\)|\w+)"

ATOMICS = [
    (r'asm volatile\("mov.u64 %0, %globaltimer;" : "=l"\((\w+)\)\);', r"\1 = now();"),
    (r'asm volatile\("fence.acq_rel.sys;" ::: "memory"\);', "__threadfence_system();"),
    (
        rf'asm volatile\("ld.acquire.{SCOPE}.global.\w+ %0, \[%1\];" : "=\w"\((\w+)\) : "l"\((\w+)\) : "memory"\);',
        r"\1 = __atomic_load_n(\2, __ATOMIC_ACQUIRE);",
    ),
    (
        rf'asm volatile\("st.(\w+).{SCOPE}.global.\w+ \[%0\], %1;" ::"l"\((\w+)\), "\w"\({VALUE}\) : "memory"\);',
        r"__atomic_store_n(\2, \3, (int)std::memory_order_\1);",
    ),
    (
        rf'asm volatile\("red.(\w+).{SCOPE}.global.add.\w+ \[%0\], %1;" ::"l"\((\w+)\), "\w"\({VALUE}\) : "memory"\);',
        r"__atomic_fetch_add(\2, \3, (int)std::memory_order_\1);",
    ),
    (
        r'asm volatile\("atom.acq_rel.gpu.global.add.u32 %0, \[%1\], 1;" : "=r"\((\w+)\) : "l"\((.*?)\) : "memory"\);',
        r"\1 = __atomic_fetch_add(\2, 1, __ATOMIC_ACQ_REL);",
    ),
]
"""PTX and its equivalent on a host. Code in `#if __CUDA_ARCH__` is absent there."""


def on_host(text: str, shim: str, folder: Path) -> ctypes.CDLL:
    """Device functions, between the two parts of a file of this folder: what they need, and what calls them."""
    for ptx, atomic in ATOMICS:
        text = re.sub(ptx, atomic, text)
    around = f'#include "{HERE / shim}"\n'
    source, made = folder / "calls.cpp", folder / "calls.so"
    source.write_text(f"{around}{text}\n#define AFTER_HEADERS\n{around}", encoding="utf-8")
    command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-pthread", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(made))
