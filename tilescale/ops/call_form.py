# SPDX-License-Identifier: MIT
"""The form of a call: its arguments but for their tensors. What is recorded for a call serves others of its form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Classes of plain tensors."""

_TENSOR = object()
"""A tensor's place in a form."""


def call_form(given: Iterable[Any], found: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Arguments but for their plain tensors, also those in lists and tuples, which `found` gets in order; None if a
    tensor has no data, or is of another class."""
    form: list[Any] = []
    for x in given:
        kind = x.__class__
        if kind in PLAIN:
            if x.is_meta:
                return None
            found.append(x)
            form.append(_TENSOR)
        elif kind is str or x is None:
            form.append(x)
        elif kind is list or kind is tuple:
            inner = call_form(x, found)
            if inner is None:
                return None
            form.append((kind, inner))
        elif isinstance(x, torch.Tensor):
            return None
        else:
            form.append((kind, x))
    return tuple(form)
