# SPDX-License-Identifier: MIT
"""`tilescale completion SHELL`: what a shell reads to complete commands, options and names of machines."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print what SHELL reads to complete commands and machines.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what SHELL reads to complete commands, options and names of machines.

    \b
    Examples, to have it from now on:
      tilescale completion bash >> ~/.bashrc
      tilescale completion zsh >> ~/.zshrc
      tilescale completion fish > ~/.config/fish/completions/tilescale.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "tilescale", "_TILESCALE_COMPLETE").source())
