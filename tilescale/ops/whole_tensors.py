# SPDX-License-Identifier: MIT
"""Collectives of tensors as a whole, whose algorithm the machine model chooses.

Where little is moved, the latency of a copy queue is more than what overlap can save: small GEMMs are PyTorch's,
with such a collective before or after them. Between nodes large ones go in chunks, see chunks.py; the collectives
themselves work inside nodes and between them at once. A program learns the number of elements with the call.
"""

from functools import cache, lru_cache
from typing import Any

import torch

import tilescale.language as T
from tilescale.collectives.record import TENSORS
from tilescale.collectives.select import AvailableAlgorithms, CollectiveQuery, select
from tilescale.comm import Team
from tilescale.cost.reach import linked
from tilescale.errors import RankMismatchError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import SUMS
from tilescale.ops.kernels import Choice, kernel, kernels
from tilescale.ops.layout import dtype_name, dtype_of
from tilescale.program.builder import Declaration
from tilescale.runtime.ahead import also_needed
from tilescale.runtime.kernel import Kernel

BY_STORES = {"allreduce": ("one_shot", "two_shot")}
"""Operation -> its algorithms by stores into peers' memory, where there are several; else it is "direct"."""

LARGEST_BITS = 36
"""Sizes of tensors are below two to the power of this."""

KEPT = 4096
"""Choices that are kept, those used last."""


def spans_nodes(team: Team) -> bool:
    """Whether no network directly links all devices of a team, by the current machine."""
    return is_split(current_machine(), team.size)


@cache
def is_split(machine: Machine, size: int) -> bool:
    """Whether no network of a machine directly links `size` devices."""
    return linked(machine, ((machine.tensor_level.name, size),)) < size


def gathered(a: torch.Tensor, team: Team, into: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of all ranks, (ranks * rows, ...), of a contiguous tensor of any type; in `into`, if that is given."""
    compare_counts(a, team)
    result = a.new_empty(team.size * len(a), *a.shape[1:]) if into is None else into
    x, y = (_moved(t, a.dtype if a.dtype in SUMS else torch.uint8) for t in (a, result))
    _kernel("all_gather", y, team)(x, y)
    return result


def scattered(a: torch.Tensor, team: Team, into: torch.Tensor | None = None, op: str = "sum") -> torch.Tensor:
    """This rank's rows of the sum, or what else `op` names, of contiguous tensors (ranks * rows, ...)."""
    compare_counts(a, team)
    result = a.new_empty(len(a) // team.size, *a.shape[1:]) if into is None else into
    x, y = _moved(a, a.dtype), _moved(result, a.dtype)
    _kernel("reduce_scatter", x, team, *(() if op == "sum" else (None, op)))(x, y)
    return result


def exchanged(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The parts of contiguous tensors (ranks * rows, ...) that are addressed to this rank."""
    compare_counts(a, team)
    result = torch.empty_like(a)
    x, y = _moved(a, torch.uint8), _moved(result, torch.uint8)
    _kernel("all_to_all", x, team)(x, y)
    return result


def sent_to_all(a: torch.Tensor, team: Team, root: int) -> torch.Tensor:
    """The root's contiguous tensor."""
    compare_counts(a, team)
    result = a.clone() if team.rank == root else torch.empty_like(a)
    impl = algorithm("broadcast", team, a.nbytes)
    kernel(broadcast_program, team, root, impl)(_moved(result, torch.uint8))
    return result


def summed(a: torch.Tensor, team: Team, into: torch.Tensor | None = None, op: str = "sum") -> torch.Tensor:
    """The sum, or what else `op` names, of contiguous tensors of all ranks; without `into`, in place."""
    compare_counts(a, team)
    result = a if into is None else into
    x, y = _moved(a, a.dtype), _moved(result, a.dtype)
    _kernel("allreduce", x, team, op)(x, y)
    return result


def choices(operation: str, moved: torch.dtype, team: Team) -> list[Choice]:
    """Kernels of "all_gather", "reduce_scatter" or a sum by "allreduce" for tensors of a type and any size."""
    dtype = dtype_name(moved if moved in SUMS else torch.uint8)
    return _choices(operation, dtype, team, *(("sum",) if operation == "allreduce" else ()))


def _kernel(operation: str, whole: torch.Tensor, team: Team, *more: Any) -> Kernel:
    """The kernel of a collective; `whole` says how much it moves, `more` is as in `_choice`. A dry run adds those of
    other sizes, whose estimates take as long as the rest of the call."""
    dtype = dtype_of(whole)
    also_needed(_kernels, operation, dtype, team, *more)
    return kernel(*_choice(operation, dtype, team, algorithm(operation, team, whole.nbytes), *more))


def _kernels(operation: str, dtype: str, team: Team, *more: Any) -> list[Kernel]:
    return kernels(*_choices(operation, dtype, team, *more))


def _choices(operation: str, dtype: str, team: Team, *more: Any) -> list[Choice]:
    return [_choice(operation, dtype, team, impl, *more) for impl in algorithms(operation, team)]


def _choice(operation: str, dtype: str, team: Team, impl: str | None, *more: Any) -> Choice:
    """The kernel of a collective by an algorithm. `more`: the last arguments of `program`, or how a sum is made."""
    if operation == "allreduce":
        return sum_program, team, dtype, *more, impl
    return program, team, operation, dtype, impl, *more


def algorithms(operation: str, team: Team) -> tuple[str | None, ...]:
    """The algorithms that `algorithm` takes, for any number of bytes."""
    return _algorithms(current_machine(), operation, team.size)


@cache
def _algorithms(machine: Machine, operation: str, ranks: int) -> tuple[str | None, ...]:
    return tuple(dict.fromkeys(_algorithm(machine, operation, ranks, 1 << bits) for bits in range(LARGEST_BITS)))


def algorithm(operation: str, team: Team, nbytes: int) -> str | None:
    """The algorithm that moves `nbytes`; None where the compiler chooses, as between nodes."""
    return _algorithm(current_machine(), operation, team.size, nbytes)


@lru_cache(KEPT)
def _algorithm(machine: Machine, operation: str, ranks: int, nbytes: int) -> str | None:
    if ranks == 1 or is_split(machine, ranks) or not has_stores(machine):
        return None
    able = BY_STORES.get(operation, ("direct",))
    wanted = CollectiveQuery(operation, TENSORS, machine.tensor_level.name, tuple(range(ranks)), (), nbytes, "bfloat16")
    return select(machine, wanted, AvailableAlgorithms(able)).name


@cache
def has_stores(machine: Machine) -> bool:
    """Whether programs store into the memory of other devices."""
    network = machine.network(machine.tensor_level.name)
    return network is not None and any(m.started_by == "program" and m.put for m in network.mechanisms)


def compare_counts(a: torch.Tensor, team: Team) -> None:
    """Raise RankMismatchError if emulated ranks have different numbers of elements."""
    if a.is_cuda or team.size == 1:
        return
    every = team.all_gather(a.numel())
    if other := next((rank for rank, elements in enumerate(every) if elements != every[0]), 0):
        raise RankMismatchError(
            f"rank 0 of the group has {every[0]} elements, rank {other} has {every[other]}",
            hint="all ranks pass tensors of the same shape",
        )


def _moved(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor as a program takes it: elements of a type, one after the other."""
    flat = x if x.ndim == 1 else x.view(-1)
    return flat if flat.dtype is dtype else flat.view(dtype)


@Declaration(1)
def program(size: int, name: str, dtype: str, impl: str | None, wire: str | None = None, op: str = "sum") -> Any:
    """A collective from one whole tensor to another."""
    part = T.dynamic("elements")
    source = part if name == "all_gather" else size * part
    target = part if name == "reduce_scatter" else size * part

    @T.prim_func
    def whole_tensors(X: T.Tensor((source,), dtype), Y: T.Tensor((target,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                if name == "all_gather":
                    T.all_gather(X, Y, impl=impl, wire=wire)
                elif name == "all_to_all":
                    T.all_to_all(X, Y, impl=impl)
                else:
                    T.reduce_scatter(X, Y, op=op, impl=impl, wire=wire)

    return whole_tensors


@Declaration(0)
def broadcast_program(size: int, root: int, impl: str | None) -> Any:
    """Whole bytes of the root, in place."""
    extent = T.dynamic("nbytes")

    @T.prim_func
    def whole_broadcast(X: T.Tensor((extent,), "uint8")):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.broadcast(X, root, impl=impl)

    return whole_broadcast


@Declaration(1)
def sum_program(size: int, dtype: str, op: str = "sum", impl: str | None = None, wire: str | None = None) -> Any:
    """The sum of whole tensors, or what else `op` names, which may be in place."""
    elements = T.dynamic("elements")

    @T.prim_func
    def whole_sum(X: T.Tensor((elements,), dtype), Y: T.Tensor((elements,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.allreduce(X, op=op, out=Y, impl=impl, wire=wire)

    return whole_sum
