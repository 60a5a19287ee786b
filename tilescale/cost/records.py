# SPDX-License-Identifier: MIT
"""JSON files from any source, as dataclasses whose fields have their declared types."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MOST = 1 << 26
"""Characters of a file; the largest that is shipped has a hundredth of them."""

LARGEST = 1 << 62
"""Numbers of measurements are below."""

Made = TypeVar("Made")


def read(path: Path) -> dict[str, Any]:
    """The object in a file of at most `MOST` characters. Raises OSError and ValueError, also for a device."""
    if not path.is_file():
        raise ValueError("it is not a file" if path.exists() else "there is no such file")
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST + 1)
    if len(text) > MOST:
        raise ValueError(f"it is longer than {MOST} characters")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("lists inside lists without an end") from None
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def made(kind: type[Made], where: str, entry: Any) -> Made:
    """A record of an object's items, with tuples for lists. Raises ValueError: `entry` is not an object, or has
    unknown, missing or wrongly typed items; says which of `where`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if wrong := sorted(entry.keys() - known.keys()):
        raise ValueError(f"{where} has {', '.join(wrong)}, which is unknown")
    if missing := sorted(needed - entry.keys()):
        raise ValueError(f"{where} has no {', '.join(missing)}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    types = _types(kind)  # type: ignore[arg-type]
    for name, value in given.items():
        if not _fits(value, types[name]):
            raise ValueError(f"{where} has a {name} that is not a valid {known[name].type}: {reprlib.repr(value)}")
    return kind(**given)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type; a number also has to be finite."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is tuple and isinstance(value, tuple):
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(each) and all(map(_fits, value, each))
    if hint in (int, float):
        types = int if hint is int else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    return isinstance(value, Mapping if origin is not None and origin is not tuple else origin or hint)
