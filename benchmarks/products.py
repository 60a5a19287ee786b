# SPDX-License-Identifier: MIT
"""Forms of a GEMM on one GPU compared with cuBLAS: candidates for operators, in float8 and in bfloat16.

    python benchmarks/products.py                        everything
    python benchmarks/products.py --only float8_e4m3fn   one type

Each form is a program of the language, `works/product_forms.py`, checked against float32 and then raced. Nsight Compute
shows where the time goes, on the same calls, once they are compiled:

    ncu --clock-control none --set full --kernel-name-base demangled -o forms python benchmarks/products.py --rounds 1
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import product_forms  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, product_forms.heats), __doc__)()
