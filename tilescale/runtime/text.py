# SPDX-License-Identifier: MIT
"""Texts of several lines, as prompts and notebooks show them."""

from __future__ import annotations


class Text(str):
    """A string that is echoed as its lines, not quoted with "\\n" between them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
