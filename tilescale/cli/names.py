# SPDX-License-Identifier: MIT
"""Names of machines as arguments of commands, which a shell completes."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from tilescale.hda import Machine

__all__ = ["MachineName"]


class MachineName(click.ParamType):
    """A built-in machine's name, or the path of a description."""

    name = "machine"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Built-in names that begin like that, then files."""
        known = [CompletionItem(name) for name in Machine.names() if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]
