# SPDX-License-Identifier: MIT
"""Simulated times of several forms of one program, at a size that shows which form wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

import tilescale


def times(forms: Sequence[Callable[..., Any]], *extents: int) -> None:
    """Print the simulated time of each form, without data. Jobs and runs with `--size` leave it out."""
    source = click.get_current_context().get_parameter_source("size")
    if source is not ParameterSource.DEFAULT or tilescale.init().size > 1:
        return
    for form in forms:
        time_us = tilescale.emulate(form(*extents), data=False).time_us
        print(f"{form.__name__}{extents} takes {time_us:.3g} us, simulated without data")
