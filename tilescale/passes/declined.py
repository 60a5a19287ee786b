# SPDX-License-Identifier: MIT
"""A rewrite that a pass declines, as it cannot prove it legal: the statement stays as the user wrote it."""

from __future__ import annotations

from tilescale.errors import Location


class Declined(Exception):  # noqa: N818 - no error
    """Why a rewrite is not made.

    Args:
        reason: as text for the user.
        where: the statement that prevents it.
    """

    def __init__(self, reason: str, where: Location | None = None):
        super().__init__(reason)
        self.reason, self.where = reason, where
