# SPDX-License-Identifier: MIT
"""A digest of a function, which changes whenever what it does may have: its source, and all that it uses.

Followed are functions that it names, as globals or from the scopes around it, unless they are of installed packages,
whose versions are known. Other values count as they are printed.
"""

from __future__ import annotations

import hashlib
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

PLAIN = (int, float, str, bytes, bool, type(None), tuple, frozenset)


def source_digest(function: Callable[..., Any]) -> str:
    """16 hexadecimal digits."""
    seen: dict[int, str] = {}
    _follow(_plain(function), seen)
    return hashlib.sha256("\0".join(sorted(seen.values())).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The function that a decorator has wrapped, as far as it tells."""
    for name in ("__wrapped__", "orig_func", "func"):
        inner = getattr(value, name, None)
        if not isinstance(value, FunctionType) and callable(inner):
            return _plain(inner)
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


def _follow(function: Any, seen: dict[int, str]) -> None:
    if not isinstance(function, FunctionType) or id(function) in seen or _is_installed(function):
        return
    seen[id(function)] = _text(function)
    for name, value in _names(function):
        inner = _plain(value)
        if isinstance(inner, FunctionType):
            _follow(inner, seen)
        elif isinstance(value, PLAIN):
            seen[hash((id(function), name))] = f"{name}={value!r}"


def _text(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interpreter
        return repr((function.__code__.co_code, function.__code__.co_consts))


def _names(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function, and those inside it, may take from around it."""
    scope = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    for name in sorted(_named(function.__code__)):
        if name in scope:
            yield name, scope[name]
        elif name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
            yield name, function.__globals__[name]
    for name, value in sorted((function.__kwdefaults__ or {}).items()):
        yield f"{function.__qualname__}.{name}", value


def _named(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_named, inner))


def _is_installed(function: FunctionType) -> bool:
    folders = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sys.prefix + "/lib")
    return function.__code__.co_filename.startswith(tuple(folders)) or function.__module__.startswith("tilescale.")
