# SPDX-License-Identifier: MIT
"""`T.Kernel`: a launch over the levels of the machine. Without a level by name it is TileLang's own."""

from __future__ import annotations

import math
from typing import Any

from tilelang_core import ir, stock, trace
from tilescale.errors import LaunchError, TileScaleError, UsageError, one
from tilescale.hda import Level, Machine
from tilescale.hda.current import current_machine
from tilescale.hda.units import format_count
from tilescale.language.context import here, plain, require_trace
from tilescale.program.ops import EXTENT, IN_ORDER, MACHINE


class _All:
    """The type of `T.ALL`."""

    def __repr__(self) -> str:
        return "T.ALL"


ALL = _All()
"""Extent of `T.Kernel`: as many units as the job has when it is launched."""


@trace.kernel_launch_factory
def Kernel(  # noqa: N802 - a name of the language
    *blocks: Any,
    threads: Any = None,
    prelude: str | None = None,
    cluster_dims: Any = None,
    in_order: bool = False,
    **levels: Any,
) -> Any:
    """Launch a program over the units of a machine.

    `T.Kernel(gx, gy, threads=256) as (bx, by)` is TileLang's launch, unchanged. With extents by level name it spans the
    machine: `T.Kernel(device=4, cta_cluster=2, block=(gx, gy), threads=256) as (bx, by)`.

    Args:
        blocks: the grid, as in TileLang; the same as naming the machine's program level.
        threads: threads of one program. A level of threads may be named instead (`warpgroup=2`).
        prelude, cluster_dims: as in TileLang.
        in_order: whether programs rely on starting in the order of their numbers, the first axis fastest: one that
            waits for those of lower numbers on any device makes progress, though not all programs are resident at once.
            GPUs start them in this order; without the option the emulator tries other orders as well.
        levels: extents by level name. Levels above the program take an int or `T.ALL`. The program level takes an int
            or a tuple, the whole grid, its first axis fastest. A cluster level takes the number of programs in a
            cluster, or a tuple: each axis of the grid is a multiple of it.

    Raises:
        UnknownLevelError: a name that the machine does not describe.
        LaunchError: more units than the machine has, or extents that contradict each other.
        UsageError: outside a traced function, or inside another launch.
    """
    require_trace("T.Kernel")
    if trace.launch() is not None:
        raise UsageError(
            "T.Kernel inside another T.Kernel",
            hint="launch one after the other, or name more levels: T.Kernel(device=4, block=n)",
            where=here(),
        )
    trace.state()["scales"] = []
    if not levels and not in_order:
        return stock.Kernel(*blocks, threads=threads, prelude=prelude, cluster_dims=cluster_dims)
    request = _Request(current_machine(), blocks, threads, cluster_dims, in_order)
    for name, extent in levels.items():
        request.add(name, extent)
    return trace.launch_kernel(
        request.blocks or (1,),
        threads=request.threads,
        prelude=prelude,
        cluster_dims=request.cluster,
        **request.annotations(),
    )


class _Request:
    """The extents of one launch, collected level by level and checked against the machine."""

    def __init__(self, machine: Machine, blocks: tuple[Any, ...], threads: Any, cluster: Any, in_order: bool):
        self.machine = machine
        self.blocks = blocks
        self.threads = _threads(threads)
        self.cluster = cluster
        self.in_order = in_order
        self.cluster_level: Level | None = None
        self.units: dict[str, Any] = {}

    def add(self, name: str, extent: Any) -> None:
        try:
            level = self.machine.level(name)
        except TileScaleError as error:
            raise error.at(*here()) from None
        getattr(self, f"_add_{level.kind}")(level, extent)

    def _add_program(self, level: Level, extent: Any) -> None:
        if self.blocks:
            raise _twice("the grid", self.blocks, level, extent)
        self.blocks = _dims(level, extent)

    def _add_cluster(self, level: Level, extent: Any) -> None:
        if self.cluster is not None:
            raise _twice("the cluster", self.cluster, level, extent)
        dims = _dims(level, extent)
        size = plain(math.prod(dims))
        if not isinstance(size, int) or size > (level.max_size or 1):
            raise LaunchError(
                f"{level.name}={extent}: a cluster of {self.machine.name!r} has at most {level.max_size} programs",
                hint=f"launch clusters of at most {level.max_size}",
                where=here(),
            )
        self.cluster = _three(dims)
        self.cluster_level = level

    def _add_unit(self, level: Level, extent: Any) -> None:
        owner = self.machine.tensor_level.name
        if self.machine.index(level.name) < self.machine.index(owner):
            raise LaunchError(
                f"{level.name}={extent}: units of {level.name!r} own no tensors, so a launch has all of them",
                hint=f"leave it out: programs of {one(owner)} run on each of its {level.name}s",
                where=here(),
            )
        self.units[level.name] = _size_variable(level.name) if extent is ALL else _count(level, extent, "or T.ALL")

    def _add_thread_group(self, level: Level, extent: Any) -> None:
        threads = _count(level, extent) * (level.threads or 1)
        given = math.prod(self.threads) if isinstance(self.threads, tuple | list) else self.threads
        if given not in (None, threads):
            raise LaunchError(
                f"{level.name}={extent} means {threads} threads, but threads={self.threads}",
                hint="keep one of the two",
                where=here(),
            )
        self.threads = threads if self.threads is None else self.threads

    def annotations(self) -> dict[str, Any]:
        """Launch annotations: the machine, the extents of the unit levels with those that are implied, the order.

        A launch of a coarse level includes one unit of each level between it and the tensors.
        """
        if self.units:
            finest = self.machine.index(self.machine.tensor_level.name)
            coarsest = max(self.machine.index(name) for name in self.units)
            for level in self.machine.levels[finest:coarsest]:
                if level.kind == "unit":
                    self.units.setdefault(level.name, 1)
        if self.cluster_level is not None:
            self._check_clusters(self.cluster_level)
        for name, extent in self.units.items():
            self._check_count(self.machine.level(name), extent)
        if not self.machine.program_level.virtual:
            self._check_count(self.machine.program_level, plain(math.prod(self.blocks)))
        extents = {EXTENT + name: ir.int_node(extent) for name, extent in self.units.items()}
        order = {IN_ORDER: ir.int_node(1)} if self.in_order else {}
        return {**extents, **order, MACHINE: ir.StringImm(self.machine.digest)}

    def _check_clusters(self, level: Level) -> None:
        grid = [plain(n) for n in _three(self.blocks)]
        if any(isinstance(n, int) and n % cluster for n, cluster in zip(grid, self.cluster, strict=True)):
            raise LaunchError(
                f"a grid of {self.blocks} programs does not divide into clusters of {self.cluster}",
                hint=f"the grid counts all programs: make each axis a multiple of {level.name}'s",
                where=here(),
            )

    def _check_count(self, level: Level, wanted: Any) -> None:
        coarser = [x for x in self.units if self.machine.index(x) > self.machine.index(level.name)]
        within = min(coarser, key=self.machine.index) if coarser else None
        there = self.machine.count(level.name, within)
        if isinstance(wanted, int) and wanted > there:
            place = f"one unit of {within!r}" if within else f"machine {self.machine.name!r}"
            raise LaunchError(
                f"the launch asks for {format_count(wanted, 'unit')} of level {level.name!r}; {place} has {there}",
                hint=f"launch at most {there}, or trace it for a larger machine: with tilescale.use_machine(name):",
                where=here(),
            )


def _three(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    return dims + (1,) * (3 - len(dims))


def _dims(level: Level, extent: Any) -> tuple[Any, ...]:
    dims = tuple(extent) if isinstance(extent, tuple | list) else (extent,)
    if not 1 <= len(dims) <= 3 or not all(_is_count(n) or isinstance(plain(n), ir.PrimExpr) for n in dims):
        raise LaunchError(
            f"{level.name}={extent!r}: the extent of this level is a positive number, or a tuple of up to three",
            hint=f"write {level.name}=n or {level.name}=(nx, ny)",
            where=here(),
        )
    return dims


def _count(level: Level, extent: Any, otherwise: str = "") -> int:
    if not _is_count(extent):
        raise LaunchError(
            f"{level.name}={extent!r}: the extent of this level is a positive number {otherwise}".rstrip(),
            hint=f"write {level.name}=n with n at least 1",
            where=here(),
        )
    return plain(extent)


def _threads(threads: Any) -> Any:
    """`threads=` of a launch: a positive number, or up to three; None leaves the choice to the back end."""
    counts = threads if isinstance(threads, tuple | list) else [threads]
    if threads is not None and not (1 <= len(counts) <= 3 and all(map(_is_count, counts))):
        raise LaunchError(
            f"threads={threads!r}: a program has a positive number of threads, or a tuple of up to three",
            hint="write threads=n or threads=(nx, ny)",
            where=here(),
        )
    return threads


def _is_count(extent: Any) -> bool:
    """Whether an extent is a positive number; not a truth value, such as TileLang makes of `a or b`."""
    value = plain(extent)
    return not isinstance(extent, bool) and isinstance(value, int) and value >= 1


def _twice(what: str, given: Any, level: Level, extent: Any) -> LaunchError:
    return LaunchError(
        f"{what} is given twice: as {given} and as {level.name}={extent}", hint="keep one of the two", where=here()
    )


def _size_variable(name: str) -> ir.Var:
    """The variable that stands for the number of units of a level until the launch."""
    known = trace.state().setdefault("sizes", {})
    if name not in known:
        known[name] = ir.Var(f"{name}_size", "int32")
    return known[name]
