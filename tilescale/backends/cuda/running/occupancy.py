# SPDX-License-Identifier: MIT
"""Grids whose programs wait for others of the same grid: they run only if all of them are on the device at once.

Programs start in the order of their numbers, and one that waits keeps its place. So

- a wait for flags that nothing in the grid signals, or for work of earlier phases, needs no other program;
- programs that only wait for those of the same number on other devices (collectives and barriers of a coarser level;
  flags of which every program has its own) always get on: the lowest number that is not done runs on all devices;
- any other wait may be for a program that has not started: all programs of the grid must be resident.

The first two rest on the order in which all NVIDIA GPUs start blocks, which CUDA does not promise; every wait is
bounded anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.errors import DeviceError, LaunchError, Location
from tilescale.hda import Machine
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.extents import evaluate
from tilescale.program.model import GridPhase, Launch

_TRIED = 1 << 20
"""Values of a flag's index that are tried at most, over all programs; with more, they count as shared."""

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ir.Add: np.add,
    ir.Sub: np.subtract,
    ir.Mul: np.multiply,
    ir.FloorDiv: np.floor_divide,
    ir.FloorMod: np.mod,
    ir.Min: np.minimum,
    ir.Max: np.maximum,
}


class _Unknown(Exception):
    """An index of which the values are not known before the launch."""


@dataclass
class _Grid:
    """What variables of a phase stand for.

    Attributes:
        known: variables with the values they have in each program of the grid.
        free: variables that take several values, with how many.
        bound: variables that stand for an expression.
    """

    known: dict[ir.Var, Any]
    free: dict[ir.Var, int] = field(default_factory=dict)
    bound: dict[ir.Var, Any] = field(default_factory=dict)

    def value(self, expr: Any, at: dict[ir.Var, int]) -> Any:
        """An expression's value in each program. Raises _Unknown."""
        if isinstance(expr, int | ir.IntImm):
            return int(expr)
        if isinstance(expr, ir.Var):
            for values in (self.known, at):
                if expr in values:
                    return values[expr]
            if expr in self.bound:
                return self.value(self.bound[expr], at)
        if isinstance(expr, ir.Cast):
            return self.value(expr.value, at)
        rule = _ARITHMETIC.get(type(expr))
        if rule is None:
            raise _Unknown
        return rule(self.value(expr.a, at), self.value(expr.b, at))

    def depends_on(self, expr: Any) -> set[ir.Var]:
        """The free variables behind an expression."""
        found: set[ir.Var] = set()
        for var in ir.variables(expr) if isinstance(expr, ir.PrimExpr) else ():
            if var in self.bound:
                found |= self.depends_on(self.bound[var])
            elif var in self.free:
                found.add(var)
        return found


def programs(launch: Launch, sizes: dict[str, int]) -> int | None:
    """How many programs the grid has; None if that is not known before the launch."""
    shape = _shape(launch, sizes)
    return None if shape is None else math.prod(shape)


def _shape(launch: Launch, sizes: dict[str, int]) -> list[int] | None:
    known = {var: sizes[name] for name, var in launch.extents if isinstance(var, ir.Var)}
    shape = [evaluate(n, known) for n in launch.grid]
    return None if None in shape else shape


def waits_across(phase: GridPhase, launch: Launch, machine: Machine, sizes: dict[str, int]) -> Location | None:
    """Where a program of the grid waits for others of the same grid; None if none does.

    Args:
        sizes: units of each launched level.
    """
    # Programs of a cluster start together.
    for node in _operations(phase.stmt) if launch.cluster_size == 1 else ():
        name = ir.op_name(node.value)
        if name in ops.COLLECTIVES and machine.level(ir.attribute(node.value, "level")).kind == "program":
            return location(node, "waits here")
    touched = list(_flags(phase.stmt))
    for flag in {buffer.data for _, buffer, _, _ in touched}:
        same = [(stmt, begins, waits) for stmt, buffer, begins, waits in touched if buffer.data.same_as(flag)]
        waiting = [stmt for stmt, _, waits in same if waits]
        if waiting and len(waiting) < len(same) and not _own(same, _grid(phase, launch, machine, sizes)):
            return location(waiting[0], "waits here")
    return None


def _operations(stmt: ir.Stmt) -> Iterator[Any]:
    found: list[Any] = []
    ir.walk(stmt, lambda n: found.append(n) if isinstance(n, ir.Evaluate) else None)
    return iter(found)


def _flags(stmt: ir.Stmt) -> Iterator[tuple[Any, ir.Buffer, list[Any], bool]]:
    """Each use of a flag: its statement, tensor and index, and whether it waits."""
    for node in _operations(stmt):
        call, name = node.value, ir.op_name(node.value)
        if name == ops.WAIT.name or name == ops.SIGNAL.name:
            region = call.args[0]
        elif name == ops.COPY.name and len(call.args) > 3:
            region = call.args[3]
        else:
            continue
        buffer, begins, _ = ir.region_parts(region)
        yield node, buffer, list(begins), name == ops.WAIT.name


def _grid(phase: GridPhase, launch: Launch, machine: Machine, sizes: dict[str, int]) -> _Grid | None:
    """The variables of a phase; None for a grid of unknown extent."""
    shape = _shape(launch, sizes)
    if shape is None:
        return None
    axes = [axis.reshape(-1) for axis in np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")]
    number = sum(axis * math.prod(shape[:i]) for i, axis in enumerate(axes))
    grid = _Grid(dict(zip(launch.programs, axes, strict=True)))
    grid.known |= {var: sizes[name] for name, var in launch.extents if isinstance(var, ir.Var)}

    def visit(node: Any) -> None:
        if isinstance(node, ir.For) and ir.constant(node.min) == 0 and ir.constant(node.extent) is not None:
            grid.free[node.loop_var] = ir.constant(node.extent)
        elif isinstance(node, ir.Bind) and ir.op_name(node.value) == ops.RANK.name:
            level = machine.level(str(node.value.args[0].value))
            if level.name in sizes:
                grid.free[node.var] = sizes[level.name]
            elif level.kind == "program" and launch.cluster_size == 1:
                grid.known[node.var] = number
        elif isinstance(node, ir.Bind):
            grid.bound[node.var] = node.value

    ir.walk(phase.stmt, visit)
    return grid


def _own(uses: list[tuple[Any, list[Any], bool]], grid: _Grid | None) -> bool:
    """Whether every program has flags of its own: no two programs of the grid use the same one."""
    if grid is None:
        return False
    owners: dict[tuple[int, ...], int] = {}
    for _, begins, _ in uses:
        free = sorted({var for begin in begins for var in grid.depends_on(begin)}, key=lambda var: var.name)
        count = len(next(iter(grid.known.values())))
        if count * math.prod(grid.free[var] for var in free) > _TRIED:
            return False
        for values in itertools.product(*[range(grid.free[var]) for var in free]):
            try:
                index = [grid.value(begin, dict(zip(free, values, strict=True))) for begin in begins]
            except _Unknown:
                return False
            columns = [np.broadcast_to(column, (count,)).tolist() for column in index]
            for program, flag in enumerate(zip(*columns, strict=True)):
                if owners.setdefault(flag, program) != program:
                    return False
    return True


@dataclass(frozen=True)
class Image:
    """A compiled kernel as the driver loads it.

    Attributes:
        code: the device code.
        name: of the kernel in it.
        threads: of one program.
        shared: bytes of dynamic shared memory of one program.
        cluster: programs that start together.
    """

    code: bytes
    name: str
    threads: int
    shared: int
    cluster: int = 1


def resident(image: Image, device: int) -> tuple[int, int]:
    """How many programs of a kernel a GPU holds at once, and its multiprocessors, as its driver says.

    Raises:
        DeviceError: the driver refuses.
    """
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name} of {image.name}: {status.name}")
        return results[0] if results else None

    shared_limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    processors = call("cuDeviceGetAttribute", count, call("cuDeviceGet", device))
    module = call("cuModuleLoadData", image.code)
    try:
        function = call("cuModuleGetFunction", module, image.name.encode())
        call("cuFuncSetAttribute", function, shared_limit, image.shared)
        each = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, image.threads, image.shared)
    finally:
        call("cuModuleUnload", module)
    # A cluster starts where its programs find room together, so what is left over of each group counts for nothing.
    return each * processors // image.cluster * image.cluster, processors


def check_resident(program: str, asked: int | None, held: int, processors: int, where: Location) -> None:
    """Refuse a grid that cannot be on the device as a whole.

    Args:
        asked: programs of the grid; None if that is not known.
        held: programs that the device holds at once.
    Raises:
        LaunchError: there is no room for all of them.
    """
    if asked is None or asked > held:
        grid = "a grid of an extent that is not known before the launch" if asked is None else f"a grid of {asked}"
        raise LaunchError(
            f"{program!r}: programs wait for others of the same grid, {grid}; the device holds {held} at once "
            f"({held // processors} on each of {processors} processors), and one that waits makes no room",
            hint=f"launch at most {held} programs, each doing several tiles in a loop; or give every program flags of "
            "its own, F[bx, ...], so that it waits for those of its own number only",
            where=where,
        )
