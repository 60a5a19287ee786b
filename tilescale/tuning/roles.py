# SPDX-License-Identifier: MIT
"""Roles as part of a configuration: the carriers of a program's collectives, and their reducers.

A program in phases does not name them. They are fields of `Move`; a configuration sets some of them for all moves that
have such a choice, and leaves the rest, such as the rows of a chunk, to the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilescale.errors import UsageError
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.runtime.kernel import Kernel

ROLES = "__roles__"
"""The key of roles within a configuration, next to TileLang's for options of its passes."""

GIVEN = ("overlapped", "carrier", "adds", "ordered", "chunk")
"""Fields of a `Move` that a configuration may set."""


@dataclass(frozen=True)
class ScheduleRoles:
    """The schedule of some roles, for `tilescale.compile`: a `Chooser`. Those that say the same are equal."""

    given: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, roles: Mapping[str, Any]) -> ScheduleRoles:
        """The roles of a configuration. Raises UsageError for a key that is not one of `GIVEN`."""
        if unknown := sorted({*roles} - {*GIVEN}):
            hint = f"it may say {', '.join(GIVEN)}, as tilescale.Move"
            raise UsageError(f"{ROLES} has {', '.join(unknown)}", hint=hint)
        return cls(tuple(sorted(roles.items())))

    def __call__(self, bind: Callable[[str | Schedule], Kernel]) -> Kernel:
        """The kernel.

        Raises:
            UsageError: no collective of the program has such a choice, or not this one.
        """
        kernel, roles = bind("overlap"), dict(self.given)
        if not roles:
            return kernel
        moves = kernel.moves.moves if kernel.moves is not None else []
        if not any(_takes(move, roles) for move in moves):
            raise UsageError(
                f"{ROLES}={roles}: no collective of the program has such a choice",
                hint="leave it out, or print what there is to choose: kernel.moves",
            )
        return bind(Schedule([_with(move, roles) if _takes(move, roles) else move for move in moves]))


def _takes(move: Move, roles: Mapping[str, Any]) -> bool:
    """Whether a move can run concurrently with grids, and has carriers to choose from where one is named."""
    carriers = {carrier for carrier, _ in move.estimates} - {None}
    return bool(move.estimates) and (bool(carriers) or not {"carrier", "adds"} & {*roles})


def _with(move: Move, roles: Mapping[str, Any]) -> Move:
    blank = Move(move.collective, move.tensors, wire=move.wire, where=move.where, axis=move.axis)
    return replace(blank, **roles)
