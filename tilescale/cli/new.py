# SPDX-License-Identifier: MIT
"""`tilescale new NAME`: a folder with a program to start from and its test."""

from __future__ import annotations

import keyword
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

import click

from tilescale.cli.tutorial import walk

DEVICES = 4
"""Devices of the new program."""


@click.command()
@click.argument("name", default="halo")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where to; a folder NAME by default.")
@click.option("--tutorial", is_flag=True, help="Run it, break it, change it and start it as a job, step by step.")
def new(name: str, folder: Path | None, tutorial: bool) -> None:
    """Make a program NAME to start from, with its test.

    Every device sends rows to its neighbour and waits for those that it receives; it runs without a GPU. NAME is halo
    by default.

    \b
    Example:
      tilescale new halo
      cd halo && python halo.py && python -m pytest
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("test_"):
        raise click.BadParameter(f"{name!r} is not a name of a Python module", param_hint="NAME")
    target = folder or Path(name)
    written = {target / f"{name}.py": "program.py.txt", target / f"test_{name}.py": "test.py.txt"}
    settings = {} if target.exists() else {target / "pytest.ini": "pytest.ini.txt"}
    if there := [path for path in written if path.exists()]:
        raise click.ClickException(f"{there[0]} already exists; no file was written")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, template in (written | settings).items():
            path.write_text(_filled(template, name), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    click.echo(f"made {' and '.join(map(str, written))}{'' if tutorial else '; begin with'}")
    if tutorial:
        walk(*written)
        return
    test = "python -m pytest" if find_spec("pytest") is not None else "python -m pip install pytest && python -m pytest"
    click.echo(f"  cd {target} && python {name}.py && {test}")


def _filled(template: str, name: str) -> str:
    text = files("tilescale.cli").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(name=name, title=name.replace("_", " ").capitalize(), devices=DEVICES)
