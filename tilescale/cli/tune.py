# SPDX-License-Identifier: MIT
"""`tilescale tune`: find the fastest configuration of a program and keep it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilescale.cli import ranks as job
from tilescale.cli.machine import console
from tilescale.cli.names import CommandFailure, machine_option, reported
from tilescale.errors import TileScaleError
from tilescale.tracebacks import line_of

if TYPE_CHECKING:
    from tilescale.tuning.autotune import Autotuned
    from tilescale.tuning.database import Tuned

EXAMPLES = """
\b
Examples:
  tilescale tune gemm.py 4096 4096 4096          the one autotuned function of a file, for this shape
  tilescale tune gemm.py:matmul M=4096 N=4096 K=4096 dtype=bfloat16
  tilescale tune -n 2 ag_gemm.py 8192 3584 8192  on two GPUs together, interleaved
  tilescale tune --top 20 gemm.py 4096 4096 4096 measure more of them
  tilescale tune --machine b200-sxm-8 gemm.py 4096 4096 4096

\b
The function is one with @tilescale.autotune above @tilescale.jit:
  @tilescale.autotune(configs=[dict(block=b, stages=s) for b in (64, 128) for s in (2, 3, 4)])
  @tilescale.jit
  def matmul(M, N, K, block=64, stages=2): ...

\b
Without GPUs times are simulated, for the machine that --machine names. What was found is kept
under TILESCALE_CACHE_DIR; calls of the function, here and in other processes, take it from there.
"""


@click.command(epilog=EXAMPLES, short_help="Find the fastest configuration of PROGRAM, and keep it.")
@job.option("1")
@machine_option
@click.option("--top", type=click.IntRange(min=1), help="Configurations that are measured at most.")
@click.option("--refresh", is_flag=True, help="Tune again what the database has already.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("program")
@click.argument("args", nargs=-1)
def tune(
    ranks: int | None,
    machine: str | None,
    top: int | None,
    refresh: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Find the fastest configuration of PROGRAM for its ARGS, and keep it.

    PROGRAM is a file, or file:function, or module:function. ARGS are Python literals, names before them as in a call; a
    tunable parameter among them is not searched.
    """
    job.join(ranks or 1)
    with reported():
        from tilescale.hda.current import as_machine, use_machine

        function = find(program)
        positional, named = _arguments(args)
        with use_machine(as_machine(machine)):
            found = function.tune(*positional, refresh=refresh, top=top, **named)
    from tilescale.comm import init

    if init().rank == 0:
        _show(found, as_json)


def find(program: str) -> Autotuned:
    """An autotuned function by its file or module, and its name if there are several.

    Raises:
        CommandFailure: no such file, module or function; the error names the existing ones.
    """
    from tilescale.tuning.autotune import Autotuned

    where, _, name = program.partition(":")
    module = _module(where)
    known = {key: value for key, value in vars(module).items() if isinstance(value, Autotuned)}
    if not known:
        advice = "write @tilescale.autotune(configs=[...]) above @tilescale.jit"
        raise CommandFailure(f"{where} has no autotuned function: {advice}")
    if name not in known and (name or len(known) > 1):
        missing = f"no autotuned function {name!r}" if name else "several autotuned functions"
        raise CommandFailure(
            f"{where} has {missing}: say one of {', '.join(f'{where}:{function}' for function in known)}"
        )
    return known.get(name) or next(iter(known.values()))


def _module(where: str) -> Any:
    path = Path(where)
    if path.suffix != ".py":
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise CommandFailure(f"{where} is neither a file nor a module: {error}") from None
    if not path.exists():
        raise CommandFailure(f"there is no file {where}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except TileScaleError:
        raise
    except Exception as error:  # noqa: BLE001 - any exception of the user's file
        place = line_of(error)
        at = "" if place is None else f"\n    at {place}"
        raise CommandFailure(f"{where} cannot be loaded: {type(error).__name__}: {error}{at}") from None
    return module


def _arguments(words: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    named = {word.partition("=")[0]: _value(word.partition("=")[2]) for word in words if _is_named(word)}
    return [_value(word) for word in words if not _is_named(word)], named


def _is_named(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # bfloat16


def _show(found: Tuned, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    from rich.table import Table

    how = "simulated" if found.simulated else "measured"
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in found.config:
        table.add_column(name)
    for heading in ("estimated, us", f"{how}, us", "spread"):
        table.add_column(heading, justify="right")
    for trial in (t for t in found.trials if t.failed is None):
        values = [str(trial.config.get(name, "")) for name in found.config]
        spread = f"{trial.spread[0]:.1f} to {trial.spread[1]:.1f}" if trial.spread else ""
        table.add_row(*values, _us(trial.estimated_us), _us(trial.us), spread)
    console().print(table)
    for trial in (t for t in found.trials if t.failed is not None):
        click.echo(f"{_words(trial.config)} does not work: {(trial.failed or '').splitlines()[0]}")
        if trial.where is not None:
            click.echo(f"    at {trial.where}")
    kept = f", as found on {found.date[:10]}: --refresh tunes again" if found.kept else ""
    click.echo(f"\nfastest: {_words(found.config)}, {_us(found.us)} us, {how}{kept}")


def _words(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
