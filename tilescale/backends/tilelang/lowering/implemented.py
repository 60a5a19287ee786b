# SPDX-License-Identifier: MIT
"""Algorithms of this back end for each collective; `check` rejects others at the user's line.

On tiles, and inside a device, each operation has one implementation. On whole tensors it has several, with different
requirements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.reach import STORES, share_memory, split
from tilescale.collectives import (
    PROGRAMS,
    TENSORS,
    THREAD_GROUPS,
    TILES,
    AvailableAlgorithms,
    CollectiveQuery,
    names,
    records,
    schedule,
    select,
)
from tilescale.collectives.request import wanted_of
from tilescale.cost.choose import MechanismChoice
from tilescale.cost.operations import network_of
from tilescale.cost.reach import delivers_lines
from tilescale.errors import UnsupportedError
from tilescale.program.effects import statements
from tilescale.program.model import GridPhase, Program, location
from tilescale.program.operations import Collective, operation

Requirement = Callable[[Collective, LoweringTarget], bool]


@dataclass(frozen=True)
class Implementation:
    """An implementation of a collective on whole tensors.

    Attributes:
        able: whether it can be used for a collective and target.
        on_tiles: whether it is a grid of collectives on tiles; else the host starts it.
        by_kernel: whether the host starts a kernel that exchanges messages with those of the peers.
        on_request: whether it is used only where a program requests it.
        normalises: whether it is for sums with normalized rows.
        narrows: whether it is for collectives that send floats in a narrower type. Without both it is for all others.
    """

    able: Requirement
    on_tiles: bool = False
    by_kernel: bool = False
    on_request: Requirement = lambda made, target: False
    normalises: bool = False
    narrows: bool = False


def _types(made: Collective) -> set[str]:
    return {str(ir.region_parts(tile)[0].dtype) for tile in made.tiles}


def _is_constant(made: Collective, target: LoweringTarget) -> bool:
    return all(ir.constant(n) is not None for tile in made.tiles for n in ir.region_parts(tile)[2])


def _by_tiles(made: Collective, target: LoweringTarget) -> bool:
    """Requires one level, whose devices share memory: programs synchronize with their counterparts on all devices."""
    return _is_constant(made, target) and len(target.sizes) == 1 and target.group_size == target.devices


def _by_tiles_in_place(made: Collective, target: LoweringTarget) -> bool:
    """Requirements of `_by_tiles` for a collective whose tiles are replaced by its results."""
    return made.is_in_place and _by_tiles(made, target)


def _by_kernel(made: Collective, target: LoweringTarget) -> bool:
    """Requires peer memory, and elements of whole bytes to be moved, or combinable ones."""
    return share_memory(target, made.level) and _sends_inside(made, target)


def _with_norm(made: Collective, target: LoweringTarget) -> bool:
    """Requires several devices, and rows of constant length: each thread of a kernel has a constant part of a row."""
    norm, several = made.norm, target.mesh.count(made.level) > 1
    return several and norm is not None and norm.columns is not None and _by_kernel(made, target)


def _by_lines(made: Collective, target: LoweringTarget) -> bool:
    """Requires a network that delivers a warp's store of a line as a whole, or one device."""
    network, alone = network_of(made.call, target.machine, dict(target.sizes)), target.mesh.count(made.level) == 1
    return (alone or delivers_lines(network)) and _by_kernel(made, target)


def _sends_inside(made: Collective, target: LoweringTarget) -> bool:
    """Requirements among the peers that share memory."""
    network = network_of(made.call, target.machine, dict(target.sizes))
    reached = network is not None and network.mechanism(STORES) is not None
    types = _types(made)
    known = types <= {*COMBINED} if made.op is not None else all(ir.bits(dtype) % 8 == 0 for dtype in types)
    return reached and made.combine is None and len(types) == 1 and known


def _by_rail(made: Collective, target: LoweringTarget) -> bool:
    """Requires several groups that share memory, of several devices each: kernels inside them, NCCL between them."""
    groups = split(target, made.level)
    apart = groups is not None and groups.across > 1 and groups.inside > 1
    return apart and _has_nccl(made, target) and _sends_inside(made, target)


def _by_levels(made: Collective, target: LoweringTarget) -> bool:
    """Whether NVSHMEM can send tiles of programs between groups; those of an all-reduce split between groups."""
    groups = split(target, made.level)
    if groups is None or groups.across == 1 or groups.inside == 1:
        return False
    return made.name != "allreduce" or shared_axis(made, groups.inside) is not None


def shared_axis(made: Collective, count: int) -> int | None:
    """The first axis of an all-reduce's tiles that `count` divides; None if there is none."""
    extents = [[ir.constant(n) for n in ir.region_parts(tile)[2]] for tile in made.tiles]
    shared = [all(n is not None and n % count == 0 for n in sizes) for sizes in zip(*extents, strict=False)]
    return shared.index(True) if True in shared else None


def _has_nccl(made: Collective, target: LoweringTarget) -> bool:
    """Requires types that NCCL combines; for moves also other elements of whole bytes, as bytes."""
    known = {*records()["nccl"].dtypes}
    is_moved = made.op is None and all(ir.bits(dtype) % 8 == 0 for dtype in _types(made))
    return target.nccl and (is_moved or _types(made) <= known)


def _drops_nan(made: Collective, target: LoweringTarget) -> bool:
    return records()["nccl"].is_kept_back(dict(target.sizes)[made.level], made.dtype, made.op)


def _copied_by_host(made: Collective, target: LoweringTarget) -> bool:
    """Requires a network with a mechanism that the host starts, peer addresses, and static sizes."""
    network = network_of(made.call, target.machine, dict(target.sizes))
    by_host = network is not None and any(m.started_by == "host" and m.put is not None for m in network.mechanisms)
    return by_host and share_memory(target, made.level) and _is_constant(made, target)


ADDED = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Types whose elements PyTorch combines as TileScale does: it does not saturate 8-bit floats."""

COMBINED = (*ADDED, "int16", "uint16", "uint32", "uint64", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
"""Types whose elements kernels combine."""

_KERNEL = Implementation(_by_kernel, by_kernel=True)
_NORM = Implementation(_with_norm, by_kernel=True, normalises=True)
_LINES = Implementation(_by_lines, by_kernel=True, narrows=True)
_NCCL = (Implementation(_has_nccl, on_request=_drops_nan),)
# The host reads the number of rows, and waits for the device.
_NCCL_OF_ROWS = (Implementation(_has_nccl, on_request=_by_kernel),)
# Peers write into the target: outside of symmetric memory this takes two more copies, which the estimates omit.
_COPIES = (Implementation(_copied_by_host, on_request=_by_kernel),)
_RAILS = (Implementation(_by_rail),)
# Tiles of tensors split along a dimension would be slices of rows: only on request, or where NCCL cannot.
_PARTS = (_KERNEL, Implementation(_by_tiles, on_tiles=True, on_request=_has_nccl))

ON_TENSORS: dict[tuple[str, str], tuple[Implementation, ...]] = {
    ("allreduce", "one_shot"): (_KERNEL, _NORM, Implementation(_by_tiles_in_place, on_tiles=True)),
    ("allreduce", "two_shot"): (_KERNEL, _NORM, _LINES),
    ("allreduce", "hierarchical_direct"): _RAILS,
    ("allreduce", "nccl"): _NCCL,
    ("reduce_scatter", "direct"): (*_PARTS, _LINES),
    ("reduce_scatter", "hierarchical_direct"): _RAILS,
    ("reduce_scatter", "nccl"): _NCCL,
    ("all_gather", "direct"): (*_PARTS, _LINES),
    ("all_gather", "hierarchical_direct"): _RAILS,
    ("all_gather", "nccl"): _NCCL,
    ("all_gather", "copy_engine"): _COPIES,
    ("all_to_all", "direct"): _PARTS,
    ("all_to_all", "hierarchical_direct"): _RAILS,
    ("all_to_all", "nccl"): _NCCL,
    ("all_to_all", "copy_engine"): _COPIES,
    ("all_to_all_v", "direct"): (_KERNEL,),
    ("all_to_all_v", "nccl"): _NCCL_OF_ROWS,
    ("broadcast", "direct"): _PARTS,
    ("broadcast", "hierarchical_direct"): _RAILS,
    ("broadcast", "nccl"): _NCCL,
    ("broadcast", "copy_engine"): _COPIES,
}
"""(operation, algorithm) -> implementations on whole tensors, the first able one of which is used. Preferred algorithms
of an operation come first."""

_PARTS_OF_TILES = dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "broadcast"), "direct")

ON_TILES = {
    TILES: {"allreduce": "one_shot", **_PARTS_OF_TILES},
    PROGRAMS: {"allreduce": "two_shot", **_PARTS_OF_TILES},
    THREAD_GROUPS: {"allreduce": "one_shot", **_PARTS_OF_TILES},
}
"""Kind of collective -> operation -> its implementation on tiles, where all participants share memory."""

BETWEEN = "hierarchical_direct"
"""The implementation between groups that share memory: inside them, and along rails."""

WITH_FUNCTION = "one_shot"
"""The algorithm of a user's combination of tiles."""


def _played(name: str) -> tuple[Implementation, ...]:
    """A kernel that plays an algorithm's rounds, only on request: the estimates are less accurate for it than for
    specialized kernels."""

    def able(made: Collective, target: LoweringTarget) -> bool:
        if not _by_kernel(made, target):
            return False
        units = dict(target.sizes)[made.level]
        return records()[name].against(units) is None and _without_relays(made, name, units)

    return (Implementation(able, by_kernel=True, on_request=lambda made, target: True),)


def _without_relays(made: Collective, name: str, units: int) -> bool:
    """Whether parts of an all-to-all go directly to their destinations: relayed parts would have no slot."""
    rounds = schedule(made.name, name, units).rounds if made.name == "all_to_all" else ()
    sent = [r for r in rounds if r.count.any()]
    return all((r.first // units == r.source).all() and (r.count <= 1).all() for r in sent)


def _has_no_kernel(operation: str, name: str) -> bool:
    record = records()[name]
    return (operation, name) not in ON_TENSORS and not (record.library or record.by_host)


BY_ROUNDS = {
    operation: tuple(name for name in names(operation, TENSORS) if _has_no_kernel(operation, name))
    for operation in dict.fromkeys(operation for operation, _ in ON_TENSORS)
    if any(_has_no_kernel(operation, name) for name in names(operation, TENSORS))
}
"""Operation -> algorithms whose rounds one kernel plays: all without their own kernel."""

ON_TENSORS |= {(operation, name): _played(name) for operation, names in BY_ROUNDS.items() for name in names}

IMPLEMENTED = frozenset(
    {(operation, TENSORS, name) for operation, name in ON_TENSORS}
    | {(operation, form, name) for form, made in ON_TILES.items() for operation, name in made.items()}
    | {(operation, TILES, BETWEEN) for operation in ON_TILES[TILES]}
)
"""All implementations, except users' functions on tiles: (operation, kind of collective, algorithm)."""


def implementation(made: Collective, target: LoweringTarget, name: str) -> Implementation | None:
    """The implementation of a collective of whole tensors by an algorithm; None if there is none."""
    wanted = made.norm is not None, made.wire is not None
    candidates = (c for c in ON_TENSORS[made.name, name] if (c.normalises, c.narrows) == wanted)
    return next((c for c in candidates if c.able(made, target)), None)


def available(made: Collective, wanted: CollectiveQuery, target: LoweringTarget) -> AvailableAlgorithms:
    if wanted.form != TENSORS:
        flat = WITH_FUNCTION if wanted.function else ON_TILES[wanted.form][made.name]
        return AvailableAlgorithms((BETWEEN, flat) if wanted.form == TILES and _by_levels(made, target) else (flat,))
    known = {n: implementation(made, target, n) for of, n in ON_TENSORS if of == made.name}
    found = {n: candidate for n, candidate in known.items() if candidate is not None}
    # Tiles take twice the memory of all parts, a gather once: among equals it is preferred.
    gathers = [n for n in found if wanted.function and not records()[n].takes_functions]
    on_request = frozenset(n for n, candidate in found.items() if candidate.on_request(made, target))
    return AvailableAlgorithms(tuple(dict.fromkeys([*gathers, *found])), on_request)


def choice(made: Collective, target: LoweringTarget, in_program: bool) -> MechanismChoice | None:
    """The algorithm of a collective; None if there is none. Raises UnsupportedError: `impl=` requests another one."""
    wanted = wanted_of(made, target.machine, dict(target.sizes), in_program)
    found = available(made, wanted, target)
    return select(target.machine, wanted, found, made.impl) if found.names else None


def why_none(made: Collective, target: LoweringTarget) -> str:
    """The reason why there is no algorithm for a collective of whole tensors, as far as it is known."""
    if made.wire is not None:
        return f": {made.wire} is sent in lines of 128 bytes, which no network of these devices delivers as a whole"
    others = sorted(_types(made) - {*ADDED})
    if made.op is None or not others or share_memory(target, made.level):
        return ""
    return f": between devices that share no memory {', '.join(ADDED)} are combined, not {', '.join(others)}"


def check(program: Program, target: LoweringTarget) -> None:
    """Reject algorithms that the collectives of programs do not have. Raises UnsupportedError: `impl=` requests one,
    with its line."""
    for stmt, phase, launch in statements(program.body):
        call = stmt.value if isinstance(stmt, ir.Evaluate) else None
        made = operation(call) if isinstance(phase, GridPhase) else None
        if isinstance(made, Collective):
            try:
                choice(made, target, in_program=True)
            except UnsupportedError as error:
                where = location(stmt) or (launch.where if launch is not None else None)
                raise error.at(where) if where else error from None
