# SPDX-License-Identifier: MIT
"""A rewrite that a stage declines, as it cannot prove it right: the phase stays as it is, and a note says why."""


class DeclinedError(Exception):
    """Why it is declined, for people."""
