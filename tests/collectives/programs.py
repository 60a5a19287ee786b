# SPDX-License-Identifier: MIT
"""One collective of each kind as a program, with what it takes and what it must leave."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import tilescale.language as T
from tilescale.collectives import PROGRAMS, TENSORS, THREAD_GROUPS, TILES

UNITS, COLUMNS = 4, 16
"""Default units of each collective, and the columns of its tensors."""

OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v", "broadcast")


def shapes(operation: str, units: int = UNITS) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of each unit's inputs, and of its results."""
    whole, part = (2 * units, COLUMNS), (2, COLUMNS)
    return {"reduce_scatter": (whole, part), "all_gather": (part, whole)}.get(operation, (whole, whole))


SHAPES = {operation: shapes(operation) for operation in OPERATIONS}
"""Operation -> the same, of `UNITS`."""


@T.macro
def collective(operation: str, impl: str | None, op: str, source: Any, target: Any):
    """The operation, from one tile or tensor to another."""
    if operation == "allreduce":
        T.copy(source, target)
        T.allreduce(target, op=op, impl=impl)
    elif operation == "broadcast":
        T.copy(source, target)
        T.broadcast(target, impl=impl)
    elif operation == "reduce_scatter":
        T.reduce_scatter(source, target, op=op, impl=impl)
    elif operation == "all_to_all_v":
        T.all_to_all_v(source, target, [2] * (int(source.shape[0]) // 2), impl=impl)
    else:
        getattr(T, operation)(source, target, impl=impl)


@cache
def program(
    operation: str, form: str, impl: str | None = None, dtype: str = "float32", op: str = "sum", units: int = UNITS
) -> Any:
    """A program of one collective of a kind, from X to Y; within a device a unit's tensors are its rows of X and Y."""
    return {TENSORS: _tensors, TILES: _tiles, PROGRAMS: _programs, THREAD_GROUPS: _thread_groups}[form](
        operation, impl, dtype, op, units
    )


def _tensors(operation: str, impl: str | None, dtype: str, op: str, units: int) -> Any:
    source, target = shapes(operation, units)

    @T.prim_func
    def tensors(X: T.Tensor(source, dtype), Y: T.Tensor(target, dtype)):
        with T.Kernel(device=units, threads=128):
            with T.Scale("device"):
                collective(operation, impl, op, X, Y)

    return tensors


def _tiles(operation: str, impl: str | None, dtype: str, op: str, units: int) -> Any:
    source, target = shapes(operation, units)

    @T.prim_func
    def tiles(X: T.Tensor(source, dtype), Y: T.Tensor(target, dtype)):
        with T.Kernel(device=units, block=1, threads=128):
            with T.Scale("block"):
                x, y = T.alloc(source, dtype, level="l1"), T.alloc(target, dtype, level="l1")
                T.copy(X, x)
                with T.Scale("device"):
                    collective(operation, impl, op, x, y)
                T.copy(y, Y)

    return tiles


def _programs(operation: str, impl: str | None, dtype: str, op: str, units: int) -> Any:
    source, target = shapes(operation, units)

    @T.prim_func
    def programs(X: T.Tensor((units, *source), dtype), Y: T.Tensor((units, *target), dtype)):
        with T.Kernel(cta_cluster=units, block=units, threads=128) as bx:
            with T.Scale("block"):
                x, y = T.alloc(source, dtype, level="l1"), T.alloc(target, dtype, level="l1")
                T.copy(X[bx, 0, 0], x)
                collective(operation, impl, op, x, y)
                T.copy(y, Y[bx, 0, 0])

    return programs


def _thread_groups(operation: str, impl: str | None, dtype: str, op: str, units: int) -> Any:
    source, target = shapes(operation, units)

    @T.prim_func
    def thread_groups(X: T.Tensor((units, *source), dtype), Y: T.Tensor((units, *target), dtype)):
        with T.Kernel(1, threads=128 * units):
            with T.Scale("warpgroup") as (rank, _):
                x, y = T.alloc(source, dtype, level="l1"), T.alloc(target, dtype, level="l1")
                T.copy(X[rank, 0, 0], x)
                collective(operation, impl, op, x, y)
                T.copy(y, Y[rank, 0, 0])

    return thread_groups


def arguments(form: str, operation: str, sources: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Arguments of each device: the sources, and the targets."""
    blank = [torch.full(shapes(operation, len(sources))[1], -1.0).to(x.dtype) for x in sources]
    if form in (TENSORS, TILES):
        return [[x.clone(), y] for x, y in zip(sources, blank, strict=True)]
    return [[torch.stack(list(sources)), torch.stack(blank)]]


def results(form: str, args: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [y for _, y in args] if form in (TENSORS, TILES) else list(args[0][1])


def wanted(operation: str, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Expected result of each unit."""
    total, count = torch.stack([x.double() for x in sources]).sum(0).to(sources[0].dtype), len(sources)

    def exchanged() -> list[torch.Tensor]:
        return [torch.cat([x.chunk(count)[rank] for x in sources]) for rank in range(count)]

    return {
        "allreduce": lambda: [total] * count,
        "reduce_scatter": lambda: list(total.chunk(count)),
        "all_gather": lambda: [torch.cat(list(sources))] * count,
        "all_to_all": exchanged,
        "all_to_all_v": exchanged,
        "broadcast": lambda: [sources[0]] * count,
    }[operation]()
