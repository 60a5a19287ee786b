# SPDX-License-Identifier: MIT
"""Sequential programs, run in order and overlapped on the emulator."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

import tilescale
from tilescale.hda import Machine
from tilescale.passes.overlap.legality import sites
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.passes.retrace import for_machine
from tilescale.passes.structure import structure
from tilescale.program.dependence import Dependence

H200 = Machine.load("h200-sxm-8")

REDUCTIONS = ("reduce_scatter", "allreduce")
"""Reductions with a carrier."""

Tensors = list[list[torch.Tensor]]


def overlapped(
    func: Any,
    *,
    chunk: int | None = None,
    carrier: str | None = None,
    ordered: bool = True,
    local: str | None = None,
    group: int | None = None,
    blocks: int | None = None,
    chunks: int | None = None,
    kept: Sequence[str] = (),
) -> tuple[Any, Schedule]:
    """A program with every possible collective overlapped, whether or not it pays.

    Args:
        carrier: of reductions; others have none.
        kept: tensors whose collectives stay in order.
    """
    found = (site for site, _ in sites(Dependence(structure(for_machine(func, H200), H200), H200)))
    wanted = [
        Move(
            site.name,
            site.tensors,
            site.tensors[0] not in kept,
            chunk=chunk,
            carrier=carrier if site.name in REDUCTIONS else None,
            ordered=ordered,
            local=local,
            group=group,
            blocks=blocks,
            chunks=chunks,
        )
        for site in found
    ]
    return overlap(func, H200, Schedule(wanted))


def copies(args: Tensors) -> Tensors:
    return [[tensor.clone() for tensor in mine] for mine in args]


def check_same(func: Any, changed: Any, args: Tensors, seeds: Sequence[int | None] = (None, 1, 2)) -> None:
    """Both programs leave the same bits in all arguments, the changed one under several interleavings without races."""
    want = copies(args)
    tilescale.emulate(func, want, machine=H200, time=False, check="none")
    check_leaves(changed, args, want, seeds)


def check_leaves(changed: Any, args: Tensors, want: Tensors, seeds: Sequence[int | None]) -> None:
    """A program leaves these bits in its arguments under several interleavings; one run finds the races of all."""
    for number, seed in enumerate(seeds):
        got, check = copies(args), "none" if number else None
        tilescale.emulate(changed, got, machine=H200, time=False, schedule_seed=seed, check=check)
        for mine, expected in zip(got, want, strict=True):
            for a, b in zip(mine, expected, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def line(function: Any, text: str) -> int:
    """The line of a function's source that has a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, found in enumerate(lines) if text in found)
