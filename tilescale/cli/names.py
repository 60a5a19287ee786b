# SPDX-License-Identifier: MIT
"""Names of machines as arguments of commands, which a shell completes; and how errors of the user are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from click.shell_completion import CompletionItem

from tilescale.errors import TileScaleError
from tilescale.hda import Machine


class CommandFailure(click.ClickException):
    """An error of the user: its message and hint, no traceback."""

    exit_code = 2


@contextmanager
def reported() -> Iterator[None]:
    """Errors of TileScale inside are shown as those of this command."""
    try:
        yield
    except TileScaleError as error:
        raise CommandFailure(str(error)) from None


class MachineName(click.ParamType):
    """A built-in machine's name, or the path of a description."""

    name = "machine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name itself, once its description was read without an error."""
        with reported():
            Machine.load(value)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Built-in names that begin like that, then files."""
        known = [CompletionItem(name) for name in Machine.names() if name.startswith(incomplete)]
        return [*known, CompletionItem(incomplete, type="file")]


machine_option = click.option(
    "--machine", type=MachineName(), help="Built-in name or file of a description.  [default: as for programs]"
)
"""The machine that a command measures or simulates."""
