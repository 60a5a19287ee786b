# SPDX-License-Identifier: MIT
"""The CUDA text of a kernel: its rewrites and checks before compilation."""

from __future__ import annotations

from typing import Any

from tilelang_core import compile as stock
from tilelang_core import ir
from tilescale.backends.tilelang.lowering.check import KernelCheck
from tilescale.backends.tilelang.lowering.groups.registers import one_array_each
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.text_rewrites import (
    called_wgmmas,
    fence_own_sums,
    wait_for_gemms,
    wait_in_loading_warps,
    whole_vectors,
    without_host_headers,
    without_wgmma_shapes,
)
from tilescale.backends.tilelang.upstream_errors import explained
from tilescale.errors import Location
from tilescale.hda import Machine
from tilescale.passes.mod_analysis import written_by_peers
from tilescale.program.model import Program

DEVICES = 4
"""Number of devices in the text of a program that leaves it open, outside of a job."""

STRIDE = 1 << 36
"""Bytes between devices in the address range of a text generated without a heap."""

REWRITES = (
    one_array_each, whole_vectors, wait_for_gemms, wait_in_loading_warps, fence_own_sums, called_wgmmas,
    without_wgmma_shapes, without_host_headers,
)  # fmt: skip
"""Rewrites of stock TileLang's text before nvcc compiles it."""


def check_of(kernel: LoweredKernel, program: Program, machine: Machine) -> KernelCheck:
    return KernelCheck.of(program.name, written_by_peers(program), kernel, machine)


def checked(
    kernel: LoweredKernel, program: Program, machine: Machine, target: Any, pass_configs: dict[str, Any] | None
) -> str:
    """The CUDA text of one kernel of a program, after the checks of `check.py`.

    Raises:
        GeneratedTextError: a text that must not run.
        AllocationTooLargeError: more shared memory than the machine has.
        ShapeError, UnsupportedError: stock TileLang cannot lower it.
    """

    def generate(func: ir.PrimFunc) -> stock.GeneratedText:
        return stock.generate(func, target, pass_configs, REWRITES)

    with explained(kernel.func, generate, program.launches[0].where):
        generated = generate(kernel.func)
        check_of(kernel, program, machine)(generated.text, generated.dynamic_shared)
    return generated.text


def check_tiles(func: ir.PrimFunc, target: Any, where: Location | None) -> None:
    """Raise a ShapeError if threads cannot share a tile of a kernel; the rest of its text is not generated."""

    def lower(func: ir.PrimFunc) -> None:
        stock.check_tiles(func, target)

    with explained(func, lower, where):
        lower(func)
