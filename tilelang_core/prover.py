# SPDX-License-Identifier: MIT
"""Z3 for the queries of TVM's analyzer: thousands of small ones, each to a new solver.

By default Z3 looks for cuts by Hermite normal forms, which suits larger problems: here these took up to a third of the
lowering of a GEMM with an epilogue. Other cuts decide the same queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import z3
from tvm.arith.analyzer import Z3ContextScope

_CUTS = "smt.arith.enable_hnf"


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """Analyzers share a context of Z3 meanwhile, without cuts by Hermite normal forms."""
    before = z3.get_param(_CUTS)
    z3.set_param(_CUTS, False)
    try:
        with Z3ContextScope():
            yield
    finally:
        z3.set_param(_CUTS, before)
