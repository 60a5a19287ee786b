# SPDX-License-Identifier: MIT
"""Restoring a model after a failure: classes, parameters, hooks and attributes of all of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def unchanged_by_failure(module: nn.Module) -> Iterator[None]:
    """If the body raises, leave the module and those in it as they were. Their tensors are kept meanwhile."""
    before = [(each, type(each), _held(vars(each))) for each in module.modules()]
    try:
        yield
    except BaseException:
        for each, kind, held in before:
            each.__class__ = kind
            _restore(held)
        raise


def _held(state: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """A module's attributes and its tables, each with its items. Handles of hooks refer to the tables themselves."""
    return [(table, dict(table)) for table in (state, *(x for x in state.values() if isinstance(x, dict)))]


def _restore(held: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, items in held:
        table.clear()
        table.update(items)
