# SPDX-License-Identifier: MIT
"""Common parts of the tests of races: marked lines, expected errors, runs in several orders."""

import inspect
import sys

import pytest
import torch

import tilescale
from tilescale.errors import RaceError

SEEDS = (None, 0, 1, 2)
ACTS = ("reads here", "writes here", "atomically updates here")


def line_of(marker):
    """Line of the calling test's module that has a comment."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    lines, _ = inspect.getsourcelines(inspect.getmodule(frame))
    (number,) = [i for i, text in enumerate(lines, start=1) if text.rstrip().endswith(f"# {marker}")]
    return number


def tensors(devices, *shapes):
    """For each device a tensor of each shape: float32, or int32 flags for shapes of one dimension."""
    return [
        [torch.zeros(s, dtype=torch.int32) if len(s) == 1 else torch.full(s, float(r)) for s in shapes]
        for r in range(devices)
    ]


def race(program, args, *markers, check="races", seed=None):
    """The error of a program that races; it names the lines with these markers, and no others."""
    with pytest.raises(RaceError) as caught:
        tilescale.emulate(program, args, check=check, schedule_seed=seed)
    error = caught.value
    assert {w.line for w in error.where} == {line_of(m) for m in markers}
    assert all(w.what in ACTS for w in error.where)
    return error


def in_every_order(program, arguments, machine=None):
    """Run the program without a report, in any order."""
    for seed in SEEDS:
        tilescale.emulate(program, arguments(), check="all", schedule_seed=seed, machine=machine)
