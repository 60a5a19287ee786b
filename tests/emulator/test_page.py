# SPDX-License-Identifier: MIT
"""docs/emulated.md lists the emulator's tables: `UPDATE_DOCS=1 pytest tests/emulator/test_page.py` writes it.

A family of operations is one file of the emulator.
"""

import sys
from pathlib import Path

from tests.page_tables import compare_tables
from tilelang_core import tl
from tilelang_core.ir import Op
from tilescale.backends.emulator import run  # noqa: F401 - fills the tables
from tilescale.backends.emulator.interpret.registry import IGNORED, OPERATIONS, VALUES, VECTORS
from tilescale.backends.emulator.numerics import INTRINSICS, intrinsics
from tilescale.program.ops import ALL_OPS

PAGE = Path(__file__).parents[2] / "docs" / "emulated.md"

ORDERINGS = "Hints and orderings, which one unit at a time and copies that complete at once have no use for."

CUDA = ("tl.", "tirx.ptx_", "tirx.mma_", "tirx.tvm_warp_", "tirx.tvm_thread_", "tirx.tvm_storage_")
NOT_CUDA = ("tl.ascend_", "tl.tileop.ascend_", "tl.simd.", "tl.ds_read_", "tl.cooperative_tensor_", "tl.tvm_")
"""Other architectures, and what only host code does."""
SYNTAX = {tl.REGION, tl.DECLARED_PTR, tl.LOOP_BREAK, "tirx.tvm_thread_invariant"}
"""Strings that occur only in arguments."""


def families() -> dict[str, set[str]]:
    """First sentence of a file -> the operations of CUDA programs that it runs."""
    found = {ORDERINGS: set(IGNORED), about(intrinsics.__name__): set(INTRINSICS)}
    for table in (OPERATIONS, VALUES, VECTORS):
        for name, rule in table.items():
            found.setdefault(about(rule.__module__), set()).add(name)
    return {title: names - ALL_OPS for title, names in sorted(found.items()) if names - ALL_OPS}


def about(module: str) -> str:
    return " ".join((sys.modules[module].__doc__ or "").split("\n\n")[0].split())


def refused(known: set[str]) -> set[str]:
    """Operations of CUDA programs that are not known."""
    every = (name for name in map(str, Op.list_op_names()) if name.startswith(CUDA) and not name.startswith(NOT_CUDA))
    return set(every) - SYNTAX - known - ALL_OPS


def shown(names: set[str]) -> str:
    return " ".join(sorted(f"`{name.rpartition('.')[2]}`" for name in names))


def test_the_page_lists_what_runs():
    runs = families()
    lines = "\n".join(f"- {title} {shown(names)}" for title, names in runs.items())
    compare_tables(PAGE, {"runs": lines, "refused": f"- {shown(refused(set().union(*runs.values())))}"})
