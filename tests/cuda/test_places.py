# SPDX-License-Identifier: MIT
"""Whether stores collide whose indices are arithmetic: of loops around them, loops of their own, and sizes."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from tilelang import tvm

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.places import collide
from tilescale.program.effects import Access
from tilescale.program.regions import BoundVariables

TILE, INNER, TURN, SIZE = (ir.Var(name, "int32") for name in ("tile", "inner", "turn", "size"))
"""A program number, a loop of a statement, a loop around it without the other statement, and an argument of the call.
"""

LOADED = ir.BufferLoad(tvm.tirx.decl_buffer((8,), "int32"), [ir.int_node(0)])
UNKNOWN = tvm.tirx.popcount(TILE)
"""Pure, and not a constant, for any tile."""


def box(*sides: tuple[Any, Any]) -> Access:
    """A store to what begins and extends so far along each dimension."""
    begins, extents = zip(*sides, strict=True)
    return access(begins, extents)


def access(begins: Iterable[Any] | None, extents: Iterable[Any] | None) -> Access:
    def nodes(given: Iterable[Any] | None) -> Any:
        return given and tuple(ir.int_node(n) if isinstance(n, int) else n for n in given)

    buffer: Any = SimpleNamespace(shape=(64,))
    return Access(ir.Var("X", "handle"), buffer, nodes(begins), nodes(extents), reads=False, writes=True)


def over(begin: Any, extent: Any) -> tuple[Any, Any]:
    return tuple(ir.int_node(n) if isinstance(n, int) else n for n in (begin, extent))  # type: ignore[return-value]


def found(
    one: Access, other: Access, tiles: int = 8, inner: Any = None, turn: Any = None, names: Iterable[Any] = (INNER,)
) -> bool:
    """Relations in both orders; `inner` and `turn` are ranges of these loops of the first access."""
    ranges = {var: over(*given) for var, given in ((INNER, inner), (TURN, turn)) if given is not None}
    inside, around = BoundVariables(ranges, names=set(names)), {TILE: over(0, tiles)}
    said = collide(one, inside, other, BoundVariables(), around)
    assert collide(other, BoundVariables(), one, inside, around) == said
    return said


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (box((0, 4)), box((0, 4)), True),
        (box((0, 4)), box((4, 4)), False),
        (box((5, 3)), box((6, 1)), True),
        (box((0, 4), (0, 4)), box((0, 4), (4, 4)), False),
        (box((0, 4), (0, 4)), box((4, 4), (0, 4)), False),
        (box((TILE, 1)), box((3, 1)), True),  # for one tile
        (box((TILE, 1)), box((8, 1)), False),
        (box((TILE, 1)), box((20, 1)), False),
        (box((TILE % 4, 1), (TILE // 4, 1)), box(((TILE + 8) % 4, 1), ((TILE + 8) // 4, 1)), False),
        (box((TILE % 4, 1), (TILE // 4, 1)), box(((TILE + 8) % 4, 1), (TILE // 8, 1)), True),
        (box((SIZE, 1)), box((TILE, 1)), False),
    ],
)
def test_boxes_collide_if_they_do_for_some_tile(one: Access, other: Access, expected: bool):
    assert found(one, other) is expected


@pytest.mark.parametrize(
    "unknown",
    [
        access(None, None),
        access(None, [1]),
        access([40], None),
        box((LOADED, 1)),
        box((40, LOADED)),
        box((UNKNOWN + 40, 1)),
        box((0, UNKNOWN)),
    ],
)
def test_what_is_not_known_collides(unknown: Access):
    assert found(unknown, box((0, 4)))


def test_what_depends_on_memory_collides_though_another_dimension_is_apart():
    assert found(box((40, 1), (0, LOADED)), box((0, 4), (0, 1)))


@pytest.mark.parametrize(("at", "expected"), [(0, True), (3, True), (4, False), (SIZE, False)])
def test_a_loop_of_a_statement_takes_all_its_values(at: Any, expected: bool):
    assert found(box((INNER, 1), (0, 1)), box((at, 1), (0, 1)), inner=(0, 4)) is expected


@pytest.mark.parametrize(
    ("turn", "at", "expected"),
    [
        ((0, 8), 3, True),
        ((0, 8), 20, False),
        ((5, 2), 6, True),
        ((5, 2), 1, False),
        ((0, 1), 0, True),
        ((0, 0), 0, False),  # it has no iteration
        ((0, LOADED), 63, True),  # as many iterations as are compared
        ((0, LOADED), 64, False),
        ((TILE, 2), 8, True),  # from the tile on
    ],
)
def test_a_loop_around_one_of_them_takes_each_of_its_values(turn: tuple[Any, Any], at: int, expected: bool):
    assert found(box((TURN, 1)), box((at, 1)), turn=turn) is expected


def test_no_tile_is_no_collision():
    assert not found(box((0, 1)), box((0, 1)), tiles=0)
