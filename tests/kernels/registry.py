# SPDX-License-Identifier: MIT
"""All plain kernels, family by family."""

from . import (
    atomics,
    attention,
    blackwell,
    cluster,
    convolution,
    eager,
    elementwise,
    gemm,
    gemm_schedules,
    gemm_special,
    indexing,
    launches,
    linear_attention,
    movement,
    normalization,
    reduction,
    roles,
    thread_level,
    warps,
    words,
)
from .base import TARGETS, PlainKernel

FAMILIES = (
    gemm,
    gemm_schedules,
    gemm_special,
    attention,
    linear_attention,
    convolution,
    reduction,
    normalization,
    elementwise,
    movement,
    indexing,
    eager,
    warps,
    thread_level,
    atomics,
    roles,
    cluster,
    launches,
    words,
    blackwell,
)

KERNELS: tuple[PlainKernel, ...] = tuple(kernel for family in FAMILIES for kernel in family.KERNELS)

__all__ = ["KERNELS", "TARGETS", "PlainKernel"]
