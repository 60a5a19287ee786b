# SPDX-License-Identifier: MIT
"""Loops that TileLang refuses: a parallel loop inside another one, a tile operation in a parallel loop, and the like.

It changes nothing. TileLang says so itself when it compiles, without the line.
"""

from __future__ import annotations

from tilelang_core.rules import broken_rule
from tilescale.errors import UsageError
from tilescale.program.model import Program, location


def check_rules(program: Program) -> None:
    """Check a whole program.

    Raises:
        UsageError: it breaks a rule of TileLang's.
    """
    broken = broken_rule(program.func)
    if broken is not None:
        said, stmt = broken
        raise UsageError(
            f"{program.name}: {said[0].lower()}{said[1:]}",
            hint="it is a rule of TileLang, which compiles no such program",
            where=location(stmt) or program.launches[0].where,
        )
