# SPDX-License-Identifier: MIT
"""A rewrite that a pass declines, as it cannot prove it right: what it is about stays as the user wrote it."""

from __future__ import annotations

from tilescale.errors import Location


class Declined(Exception):  # noqa: N818 - no error
    """Why a rewrite is not made.

    Args:
        reason: in words for a person.
        where: the statement that prevents it.
    """

    def __init__(self, reason: str, where: Location | None = None):
        super().__init__(reason)
        self.reason, self.where = reason, where
