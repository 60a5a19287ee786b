# SPDX-License-Identifier: MIT
"""Keep vector stores from registers to tensors whole.

Why: nvcc splits a vector that is copied out of an array in registers, and merges it again only sometimes: 16 bytes then
become four stores of 4, each of a quarter of a warp's store. Before: text with such copies. After: the same text with a
store function of TileScale (headers/sync.cuh) instead.
"""

from __future__ import annotations

import re

_PARAMETERS = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?\w+\(([^)]*)\) \{")
_POINTER = re.compile(r"\* *(?:__restrict__ *)?(\w+)$")
_ARRAY = re.compile(r"^ +\w+ (\w+)\[\d+\];$", re.MULTILINE)
_COPY = re.compile(r"^( *)\*\(((?:u?int|float)[24])\*\)\(((\w+) \+ .*)\) = (\*\(\2\*\)\((\w+) \+ .*\));$", re.MULTILINE)


def whole_vectors(text: str) -> str:
    """A text whose copies of 8 or 16 bytes from arrays in registers into tensors are one store each."""
    found = (_POINTER.search(one) for kernel in _PARAMETERS.findall(text) for one in kernel.split(","))
    tensors = {pointer[1] for pointer in found if pointer is not None}
    arrays = set(_ARRAY.findall(text))

    def stored(copy: re.Match[str]) -> str:
        indent, vector, target, tensor, value, array = copy.groups()
        is_copied = tensor in tensors and array in arrays
        return f"{indent}tilescale::store_whole(({vector}*)({target}), {value});" if is_copied else copy[0]

    return _COPY.sub(stored, text)
