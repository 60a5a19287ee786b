# SPDX-License-Identifier: MIT
"""Commands that measure on all GPUs together: they start themselves again as a job of a rank for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def option(default: str) -> Callable[[Command], Command]:
    """The option for the number of ranks; `default` describes its default."""
    text = f"Ranks that measure together, one for each GPU.  [default: {default}]"
    return click.option("-n", "--ranks", type=click.IntRange(min=1), help=text)


def join(ranks: int | None) -> None:
    """Continue within a job: the one that a launcher has started, or one of `ranks` ranks that is started now.

    Under a launcher `ranks` is ignored. Without GPUs one process simulates all units.
    """
    import torch

    from tilescale.comm import init
    from tilescale.settings import settings

    if init().size > 1 or settings().emulate or not torch.cuda.is_available():
        return
    wanted = ranks or torch.cuda.device_count()
    if wanted > 1:
        _start(wanted)


def _start(ranks: int) -> NoReturn:
    """Become torchrun, which leaves the terminal to the ranks: so the first one can show a progress bar."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "tilescale.cli", *sys.argv[1:]])
