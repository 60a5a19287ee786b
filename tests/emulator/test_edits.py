# SPDX-License-Identifier: MIT
"""Places of a traced function for another statement, and the names in scope there."""

from __future__ import annotations

import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilelang_core import ir
from tilescale.backends.emulator import edits
from tilescale.errors import Location


@T.prim_func
def program(X: T.Tensor((4, 8), "float32"), F: T.Tensor((2,), "int32"), last: T.int32):
    with T.Kernel(device=2, block=1, threads=32):
        with T.Scale("device") as (rank, _):
            for row in T.serial(3):
                for _ in T.serial(2):
                    X[row, 0] = 1.0  # in loops
            if rank < last: X[3, 0] = 2.0  # fmt: skip  # noqa: E701  # on a line with its condition


def places(line: str) -> list[edits.Place]:
    return edits.places(program, Location(__file__, line_of(line)))


def test_names_that_a_user_ignores_are_not_in_scope():
    (place,) = places("in loops")
    assert [var.name for var in place.names] == ["rank", "row"]
    assert [(var.name, level) for var, level in place.ranks] == [("rank", "device")]
    assert [ir.constant(loop.extent) for loop in place.loops] == [3, 2]


def test_a_condition_on_the_line_of_its_statement_is_no_place_of_its_own():
    (place,) = places("on a line with its condition")
    assert isinstance(place.stmt, ir.BufferStore)


def test_a_statement_is_added_at_each_of_several_places():
    flag, found = program.buffer_map[program.params[1]], [*places("in loops"), *places("on a line with its condition")]
    made = edits.wait(flag, [ir.int_node(0)], ir.int_node(1))
    for behind in (False, True):
        changed = edits.added(program, found, made, behind=behind)
        pairs = [stmt.seq for stmt in ir.statements(changed.body) if isinstance(stmt, ir.SeqStmt)]
        ends = [seq[0 if behind else 1] for seq in pairs if len(seq) == 2]
        assert all(any(end.same_as(place.stmt) for end in ends) for place in found)
