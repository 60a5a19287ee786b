# SPDX-License-Identifier: MIT
"""Execution of the lowered kernels of all ranks: every store by its slot, index and device number.

A rank is a thread, its blocks run one after the other. Stores land at once; NVSHMEM's puts when they are called;
barriers are those of Python. So this checks the results of a lowering, not the order of accesses between its barriers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel

TIMEOUT_S = 20
SHIFT = 1
"""By which the slots of a group's devices are rotated."""

BINARY = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "Max": max, "Min": min, "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt,
    "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "And": lambda a, b: a and b, "Or": lambda a, b: a or b,
}  # fmt: skip


class Job:
    """All ranks of one program of a single level: `near` of consecutive numbers share memory."""

    def __init__(self, kernel: LoweredKernel, ranks: int, near: int):
        self.kernel, self.ranks, self.near = kernel, ranks, near
        self._memory: dict[tuple[Any, ...], np.ndarray] = {}
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._lock = threading.Lock()

    def memory(self, rank: int, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        """A workspace of a rank: zero at first."""
        with self._lock:
            return self._memory.setdefault((rank, name), np.zeros(tuple(shape), dtype))

    def peer(self, rank: int, own: np.ndarray, peer: int) -> np.ndarray:
        """The counterpart on another rank of `own`."""
        with self._lock:
            name = next(name for (of, name), array in self._memory.items() if of == rank and array is own)
        return self.memory(peer, name, own.shape, str(own.dtype))

    def slot(self, rank: int) -> int:
        """Address of a rank's memory for the ranks of its group."""
        return (rank + SHIFT) % self.near

    def wait(self, members: Sequence[int]) -> None:
        """Until all of some ranks are here."""
        with self._lock:
            barrier = self._barriers.setdefault(tuple(members), threading.Barrier(len(members)))
        barrier.wait(TIMEOUT_S)

    def run(self, tensors: Sequence[Sequence[np.ndarray]]) -> None:
        """The program on the tensors of all ranks."""
        with ThreadPoolExecutor(self.ranks) as pool:
            done = [pool.submit(self._run, Rank(self, rank, tensors[rank])) for rank in range(self.ranks)]
        errors = [found for each in done if (found := each.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])

    def _run(self, rank: Rank) -> None:
        try:
            rank.run()
        except BaseException:
            for barrier in list(self._barriers.values()):
                barrier.abort()
            raise


class Rank:
    """A rank at work: the values of variables, and its memory by data variable of a buffer."""

    def __init__(self, job: Job, rank: int, tensors: Sequence[np.ndarray]):
        self.job, self.rank = job, rank
        self.values: dict[ir.Var, Any] = {}
        self.arrays: dict[ir.Var, Any] = {}
        pairs = zip(ir.parameters(job.kernel.func), job.kernel.arguments, strict=True)
        for (var, buffer), argument in pairs:
            if buffer is not None:
                self.arrays[buffer.data] = self._tensor(argument, tensors)
            elif isinstance(argument, arg.DeviceRank):
                self.values[var] = rank
            else:
                self.values[var] = SHIFT if isinstance(argument, arg.SlotShift) else 0

    def _tensor(self, argument: arg.Argument, tensors: Sequence[np.ndarray]) -> Any:
        if isinstance(argument, arg.CallerArgument):
            return tensors[argument.position]
        if not isinstance(argument, arg.KernelWorkspace):
            return np.zeros(8, np.int64)
        own = argument.name, argument.shape, argument.dtype
        if not argument.peers:
            return self.job.memory(self.rank, *own)
        first = self.rank // self.job.near * self.job.near
        group = {self.job.slot(peer): self.job.memory(peer, *own) for peer in range(first, first + self.job.near)}
        return [group[slot] for slot in sorted(group)]

    def run(self) -> None:
        self.stmt(self.job.kernel.func.body)

    # -- statements --------------------------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> None:
        """A statement, those inside it in order."""
        if isinstance(stmt, ir.Bind):
            self.values[stmt.var] = self.expr(stmt.value)
        elif isinstance(stmt, ir.For):
            for i in range(int(self.expr(stmt.min)), int(self.expr(stmt.min) + self.expr(stmt.extent))):
                self.values[stmt.loop_var] = i
                self.stmt(stmt.body)
        elif isinstance(stmt, ir.IfThenElse):
            if self.expr(stmt.condition):
                self.stmt(stmt.then_case)
        elif isinstance(stmt, ir.BufferStore):
            array, index = self.place(stmt)
            array[index] = self.expr(stmt.value)
        elif isinstance(stmt, ir.Evaluate):
            self.call(stmt.value)
        else:
            for inner in ir.children(stmt):
                self.stmt(inner)

    def array(self, buffer: ir.Buffer) -> Any:
        """The memory of a buffer; that on chip is made when it is first touched."""
        if buffer.data not in self.arrays:
            self.arrays[buffer.data] = np.zeros([ir.integer(n) for n in buffer.shape], str(buffer.dtype))
        return self.arrays[buffer.data]

    def place(self, access: Any) -> tuple[np.ndarray, tuple[int, ...]]:
        """The array that an access touches, of a peer maybe, and the index there."""
        array, index = self.array(access.buffer), tuple(int(self.expr(i)) for i in access.indices)
        return (array[index[0]], index[1:]) if isinstance(array, list) else (array, index)

    def region(self, region: ir.Call) -> np.ndarray:
        """The elements of a tile."""
        buffer, begins, extents = ir.region_parts(region)
        array, at = self.array(buffer), [int(self.expr(b)) for b in begins]
        sizes = [int(self.expr(n)) for n in extents]
        if isinstance(array, list):
            array, at, sizes = array[at[0]], at[1:], sizes[1:]
        return array[tuple(slice(b, b + n) for b, n in zip(at, sizes, strict=True))]

    def call(self, call: Any) -> None:
        """A tile operation, or a device function."""
        if tir.is_extern(call):
            name = str(tir.extern_name(call)).removeprefix("tilescale::").split("<")[0]
            if name in FUNCTIONS:
                FUNCTIONS[name](self, [self.expr(a) for a in call.args[1:]])
        elif str(ir.op_name(call)).endswith(".copy"):
            source, target = map(self.region, call.args[:2])
            target[...] = source.reshape(target.shape).astype(target.dtype)

    # -- expressions -------------------------------------------------------------------------------------------------

    def expr(self, expr: Any) -> Any:
        """The value of an expression; an address is the array, and the number of the element in it."""
        kind = type(expr).__name__
        if isinstance(expr, int | float):
            return expr
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return expr.value
        if isinstance(expr, ir.Var):
            return self.values.get(expr, 0)
        if kind in BINARY:
            return BINARY[kind](self.expr(expr.a), self.expr(expr.b))
        if isinstance(expr, ir.BufferLoad):
            array, index = self.place(expr)
            return array[index]
        if isinstance(expr, ir.Cast):
            return np.dtype(str(expr.dtype)).type(self.expr(expr.value))
        if kind == "Select":
            return self.expr(expr.true_value if self.expr(expr.condition) else expr.false_value)
        assert isinstance(expr, ir.Call), f"{kind}: {expr}"
        if tir.is_extern(expr):
            name, args = str(tir.extern_name(expr)).removeprefix("tilescale::"), [self.expr(a) for a in expr.args[1:]]
            return VALUES[name](*args) if name in VALUES else args
        name = str(ir.op_name(expr))
        if name.endswith("address_of"):
            return self.array(expr.args[0].buffer)
        return 1 if "elect" in name else 0


def _put(rank: Rank, args: list[Any]) -> None:
    """Copy the part inside both tensors into the peer's array of the same name."""
    (source, *mine), (target, *theirs), rows, columns, pe = args
    near, far = source.reshape(-1), rank.job.peer(rank.rank, target, int(pe)).reshape(-1)
    for i in range(rows):
        for j in range(columns):
            where = [_inside(place, i, j) for place in (mine, theirs)]
            if None not in where:
                far[where[1]] = near[where[0]]


def _inside(place: list[Any], i: int, j: int) -> int | None:
    offset, step, row, rows, column, columns = map(int, place)
    fits = 0 <= row + i < rows and 0 <= column + j < columns
    return offset + (row + i) * step + column + j if fits else None


def _barrier_of_siblings(rank: Rank, args: list[Any]) -> None:
    _barrier(rank, args[2], args[3], args[4])


def _barrier_of_groups(rank: Rank, args: list[Any]) -> None:
    _barrier(rank, args[2], args[4], args[5])


def _barrier(rank: Rank, siblings: list[Any], index: int, epochs: np.ndarray) -> None:
    number, size, first, step = map(int, siblings[:4])
    assert first + number * step == rank.rank, "it takes itself for another one"
    epochs[int(index)] += 1
    rank.job.wait([first + j * step for j in range(size)])


FUNCTIONS: dict[str, Callable[[Rank, list[Any]], None]] = {
    "start_put": _put,
    "barrier_of_siblings": _barrier_of_siblings,
    "barrier_of_groups": _barrier_of_groups,
}
"""Device functions that do more here than wait for what is done at once."""

VALUES: dict[str, Callable[..., Any]] = {
    "following": lambda number: number + 1,
    "last_message": lambda counts, program: counts[int(program)],
}
"""Device functions with a value; others are their arguments."""
