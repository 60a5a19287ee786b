# SPDX-License-Identifier: MIT
"""Choices for operations of a program: what `choose.py` asks for, read off the IR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilelang_core import ir
from tilelang_core.bounds import at_most, divisor
from tilescale.cost.calibrated import in_force
from tilescale.cost.choose import MechanismChoice, TileTransfer, mechanism
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine, Network
from tilescale.program.model import bytes_of
from tilescale.program.operations import Copy


def copy_choice(
    call: ir.Call,
    machine: Machine,
    sizes: Mapping[str, int],
    programs: int | None,
    starters: tuple[str, ...] = ("program", "host"),
    names: Mapping[ir.Var, ir.PrimExpr] | None = None,
) -> MechanismChoice:
    """The mechanism of a `T.copy` to or from another unit. Raises UnsupportedError: what `impl=` asks for, or every
    mechanism, cannot do it.

    Args:
        sizes: units of each launched level, coarsest first.
        programs: how many programs of a unit copy at the same time, None for a copy of whole tensors.
        starters: the possible initiators of a copy of whole tensors.
        names: values of the program's variables, to bound extents that are known at launch only.
    """
    network = network_of(call, in_force(machine), sizes)
    copy = Copy.of(call)
    if network is None:
        raise UnsupportedError(f"no network of {machine.name} connects units of level {copy.level!r}")
    wanted = _transfer(copy, programs or 1, starters if programs is None else None, names or {})
    return mechanism(network, wanted, copy.impl)


def _transfer(
    copy: Copy, programs: int, whole: tuple[str, ...] | None, names: Mapping[ir.Var, ir.PrimExpr]
) -> TileTransfer:
    """The transfer of a copy; `whole` lists the possible initiators of a copy of whole tensors."""
    near_buffer, far_buffer = ir.region_parts(copy.near)[0], ir.region_parts(copy.far)[0]
    rows = math.gcd(_row_bytes(copy.near), _row_bytes(copy.far))
    begins = math.gcd(_begin_bytes(copy.near, names), _begin_bytes(copy.far, names))
    if near_buffer.dtype != far_buffer.dtype:
        rows = 1  # a conversion takes the elements one by one
    operation, nbytes = "put" if copy.to_peer else "get", region_bytes(copy.far)
    bounds = [_bytes_at_most(region, names) for region in (copy.near, copy.far)]
    most = min((bound for bound in bounds if bound is not None), default=None)
    if whole is None:
        scope = ir.scope_kind(near_buffer)
        return TileTransfer(operation, scope, nbytes, rows, programs, at_most=most, begin_bytes=begins)
    # A grid is made for extents that are known.
    starters = ("host",) if nbytes is None else whole
    return TileTransfer(
        operation, ir.scope_kind(near_buffer), nbytes, rows, whole=True, starters=starters, at_most=most
    )


def _row_bytes(region: ir.Call) -> int:
    """Common divisor of a region's contiguous bytes and the steps between its rows."""
    buffer, _, extents = ir.region_parts(region)
    size = ir.bits(str(buffer.dtype)) // 8
    steps = [extents[-1], *([buffer.shape[-1]] if len(buffer.shape) > 1 else [])]
    return math.gcd(*((ir.constant(n) or 1) * size for n in steps))


def _begin_bytes(region: ir.Call, names: Mapping[ir.Var, ir.PrimExpr]) -> int:
    """Common divisor of the places where a region's rows begin, as far as the steps between rows allow; 0 for none."""
    buffer, begins, _ = ir.region_parts(region)
    return divisor(begins[-1], names) * (ir.bits(str(buffer.dtype)) // 8)


def region_bytes(region: ir.Call) -> int | None:
    """Bytes of a region; None if they are known at launch only."""
    buffer, _, extents = ir.region_parts(region)
    return bytes_of(extents, buffer.dtype)


def _bytes_at_most(region: ir.Call, names: Mapping[ir.Var, ir.PrimExpr]) -> int | None:
    """An upper bound of the bytes of a region, None without one: an extent is at most that of its buffer."""
    buffer, _, extents = ir.region_parts(region)
    pairs = zip(extents, buffer.shape, strict=False)
    bounds = [[at_most(n, names) for n in pair] for pair in pairs]
    if any(pair == [None, None] for pair in bounds):
        return None
    elements = math.prod(min(n for n in pair if n is not None) for pair in bounds)
    return elements * ir.bits(str(buffer.dtype)) // 8


def network_of(call: Any, machine: Machine, sizes: Mapping[str, int]) -> Network | None:
    """The network between the units of which an operation speaks."""
    level = ir.attribute(call, "level")
    launched = list(sizes)
    coarser = launched[: launched.index(level)] if level in launched else []
    return machine.network(level, coarser[-1] if coarser else None) or machine.network(level)
