# SPDX-License-Identifier: MIT
"""Describe wrong results: where they are, an example, and the mistake that they look like."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import torch
from cases import Case, Tensors

WIDTH = 110


def difference(case: Case, got: Tensors, advice: str) -> str | None:
    """Describe errors in the results of a launch, or return None.

    Args:
        case: the launch.
        got: all its tensors, after it.
        advice: the text for values of no known mistake.
    """
    for name, wanted in case.want.items():
        wrong = [_wrong(g, w, case.tolerance) for g, w in zip(got[name], wanted, strict=True)]
        if _any(wrong):
            looks = _looks_like(case, name, got[name]) or _empty(got[name], case.args[name], wrong) or advice
            return f"{_where(name, got[name], wanted, wrong)}\n\n{fill(looks, WIDTH)}".rstrip()
    return None


def _wrong(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Mask of the wrong elements."""
    want = want.double()
    return ~((got.double() - want).abs() <= tolerance * (1 + want.abs()))  # NaN is not within any bound


def _any(wrong: Sequence[torch.Tensor]) -> bool:
    return any(bool(w.any()) for w in wrong)


def _where(name: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> str:
    devices = [device for device, w in enumerate(wrong) if bool(w.any())]
    first = devices[0]
    places = wrong[first].nonzero()
    box = ", ".join(f"{low}:{high + 1}" for low, high in zip(places.amin(0), places.amax(0), strict=True))
    place = tuple(places[0].tolist())
    owner = f" of device {first}" if len(wrong) > 1 else ""
    text = (
        f"{name}{owner} is wrong in {len(places)} of {wrong[first].numel()} elements, all of them in {name}[{box}].\n"
        f"The first is {name}{list(place)}: it is {float(got[first][place]):.9g}, "
        f"and should be {float(want[first][place]):.9g}."
    )
    right = [device for device in range(len(wrong)) if device not in devices]
    if right:
        text += f"\nIt is wrong on {_devices(devices)} and right on {_devices(right)}."
    elif len(wrong) > 1:
        text += f"\nIt is wrong on all {len(wrong)} devices."
    return text


def _looks_like(case: Case, name: str, got: Sequence[torch.Tensor]) -> str:
    """Return the mistake that leaves exactly these values."""
    for text, tensors in case.mistakes:
        left = tensors.get(name)
        if left and not _any([_wrong(g, x, case.tolerance) for g, x in zip(got, left, strict=True)]):
            return text
    return ""


def _empty(got: Sequence[torch.Tensor], given: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> str:
    """Whether NaN is the only error, in a tensor that was full of it."""
    if all(bool(x.isnan().all()) for x in given) and all(
        bool(g[w].isnan().all()) for g, w in zip(got, wrong, strict=True)
    ):
        return "NaN is what results hold before a launch: it was not written."
    return ""


def _devices(numbers: Sequence[int]) -> str:
    return f"device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
