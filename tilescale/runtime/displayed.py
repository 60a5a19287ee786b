# SPDX-License-Identifier: MIT
"""Texts as prompts and notebooks show them."""

from __future__ import annotations


class DisplayedText(str):
    """A string that prompts and notebooks show as its lines, not quoted with "\\n" between them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
