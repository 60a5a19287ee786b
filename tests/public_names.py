# SPDX-License-Identifier: MIT
"""All public names, for the tests of docstrings and of the pages generated from them."""

from __future__ import annotations

from functools import cache, cached_property

import tilescale
import tilescale.comm
import tilescale.ops


@cache
def public_names() -> dict[str, object]:
    """Name -> value: what the public modules export, and the public members of exported classes."""
    language = tilescale.language
    names = {f"T.{name}": getattr(language, name) for name in (*language.ADDED, *language.EXTENDED)}
    for module in (tilescale, tilescale.hda, tilescale.comm, tilescale.ops, tilescale.errors):
        for name in module.__all__:
            if getattr(module, name) not in names.values():  # once, under the shortest name
                names[f"{module.__name__}.{name}"] = getattr(module, name)
    classes = {name: value for name, value in names.items() if isinstance(value, type)}
    for owner, cls in classes.items():
        # Members of a base without a public name are listed for the class itself.
        bases = [c for c in cls.__mro__ if c.__module__.startswith("tilescale.") and c not in classes.values()]
        for key, value in [item for each in (cls, *bases) for item in vars(each).items()]:
            if isinstance(value, classmethod | staticmethod):
                value = value.__func__
            public = not key.startswith("_") or key == "__call__"
            if public and (isinstance(value, property | cached_property) or callable(value)):
                names[f"{owner}.{key}"] = value
    return names


def documented(value: object) -> object:
    """The object whose docstring speaks for `value`."""
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, cached_property) else value
