# SPDX-License-Identifier: MIT
"""Programs that set registers before, in and behind pipelined loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilescale.language as T
from tests.cuda.ordered_programs import M, program

DEPTH = 16
"""Columns of a tile that is loaded ahead."""


@T.macro
def sums_over_two_loops(X, ws, Z):
    a, b = (T.alloc((M, DEPTH), "float16", level="l1") for _ in range(2))
    c = T.alloc((M, M), "float32", level="l0")
    T.clear(c)
    for turn in T.serial(3):
        for k in T.Pipelined(M // DEPTH, num_stages=2):
            T.copy(X[0, (k + turn) % 4 * DEPTH], a)
            T.copy(X[0, k * DEPTH], b)
            T.gemm(a, b, c, transpose_B=True)
    T.copy(c, Z)


@T.macro
def set_behind_the_loop(X, ws, Z):
    a, b = (T.alloc((M, DEPTH), "float16", level="l1") for _ in range(2))
    c = T.alloc((M, M), "float32", level="l0")
    at = T.alloc_var("int32")
    at = 1
    first = at + 1
    T.clear(c)
    for _ in T.serial(3):
        for k in T.Pipelined(M // DEPTH, num_stages=2):
            T.copy(X[0, (k + at) % 4 * DEPTH], a)
            T.copy(X[0, first * DEPTH], b)
            T.gemm(a, b, c, transpose_B=True)
        at = at * 2 + 1
    T.copy(c, Z)


@T.macro
def set_in_the_loop(X, ws, Z):
    a, b = (T.alloc((M, DEPTH), "float16", level="l1") for _ in range(2))
    c = T.alloc((M, M), "float32", level="l0")
    at = T.alloc_var("int32")
    at = 1
    T.clear(c)
    for k in T.Pipelined(M // DEPTH, num_stages=3):
        T.copy(X[0, at % 4 * DEPTH], a)
        T.copy(X[0, k * DEPTH], b)
        T.gemm(a, b, c, transpose_B=True)
        at = at * 2
    T.copy(c, Z)


@T.macro
def set_before_a_branch(X, ws, Z):
    a, b = (T.alloc((M, DEPTH), "float16", level="l1") for _ in range(2))
    c = T.alloc((M, M), "float32", level="l0")
    T.fill(c, 3)
    if X[0, 0] > 0:
        for k in T.Pipelined(M // DEPTH, num_stages=2):
            T.copy(X[0, k * DEPTH], a)
            T.copy(X[0, k * DEPTH], b)
            T.gemm(a, b, c, transpose_B=True)
    T.copy(c, Z)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "sums_over_two_loops": lambda: program(128, (M, M), sums_over_two_loops, "float16"),
    "set_behind_the_loop": lambda: program(128, (M, M), set_behind_the_loop, "float16"),
    "set_in_the_loop": lambda: program(128, (M, M), set_in_the_loop, "float16"),
    "set_before_a_branch": lambda: program(128, (M, M), set_before_a_branch, "float16"),
}
