# SPDX-License-Identifier: MIT
"""Several CUDA texts as one file: the compiler parses TileLang's headers, most of a small kernel's time, once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

KERNEL = re.compile(r'^extern "C" __global__ void [^;]*? \{\n.*?^\}$', re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"(\w+_kernel)\(")


def kernels(text: str) -> set[str]:
    """Names of the kernels of a text."""
    return {_NAME.search(kernel)[1] for kernel in KERNEL.findall(text)}  # type: ignore[index]  # each has one


def renamed(text: str, number: int) -> str:
    """A text whose kernels have other names than those of texts with another number."""
    return _NAME.sub(rf"program{number}_\1(", text)


def headers(text: str) -> frozenset[str]:
    """Equal for texts that may be in one file: some define what headers of others do."""
    return frozenset(re.findall(r"^#(?:include .*|define TILESCALE_WGMMA)", text, re.MULTILINE))


def by_headers(texts: Iterable[str]) -> list[list[str]]:
    """Texts by their headers."""
    alike: dict[frozenset[str], list[str]] = {}
    for text in texts:
        alike.setdefault(headers(text), []).append(text)
    return list(alike.values())


def joined(texts: Sequence[str]) -> str:
    """One file of texts whose kernels have different names: each kernel's shared arrays get names of their own.

    Texts that leave out parts of the C++ library come last: what is included behind such a text lacks these parts.
    """
    counted = itertools.count()

    def own_array(found: re.Match[str]) -> str:
        array = re.search(r"extern __shared__ .*?(\w+)\[\];", found[0])
        return re.sub(rf"(?<!\.)\b{array[1]}\b", f"shared_{next(counted)}", found[0]) if array else found[0]

    complete_first = sorted(texts, key=lambda text: "#pragma push_macro" in text)
    return "\n".join(KERNEL.sub(own_array, text) for text in complete_first)
