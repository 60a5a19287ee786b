# SPDX-License-Identifier: MIT
"""A digest of a function, which changes whenever its behaviour may have: its source, and all that it uses.

The digest follows the names that the function uses, as globals, in modules or from enclosing scopes: functions and
classes with their names, containers and objects with their contents. Installed packages count by version: their
functions are not followed, and their objects count as they are printed. Imports inside a function are not seen.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

Part = tuple[str, Any]

PLAIN = (int, float, complex, str, bytes, type(None))


def source_digest(function: Callable[..., Any]) -> str:
    """The digest of a function and of all that it uses: 16 hexadecimal digits."""
    lines: list[str] = []
    _follow("", _plain(function), lines, {})
    return hashlib.sha256("\0".join(sorted(lines)).encode()).hexdigest()[:16]


def _follow(name: str, value: Any, lines: list[str], seen: dict[int, Any]) -> None:
    """Write down a value and, once, its parts. `seen` keeps alive the objects whose ids are used."""
    value = _plain(value)
    lines.append(f"{name}={_text(value)}")
    if isinstance(value, PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value
    for inner, part in _parts(value):
        _follow(inner, part, lines, seen)


def _plain(value: Any) -> Any:
    """The function that a decorator has wrapped, as far as the decorator shows it."""
    if isinstance(value, FunctionType):
        return inspect.unwrap(value)
    for name in () if isinstance(value, functools.partial) else ("__wrapped__", "orig_func", "func", "fget"):
        inner = getattr(value, name, None)
        if callable(inner):
            return _plain(inner)
    return value


def _text(value: Any) -> str:
    """A value by itself, the same in every process."""
    if isinstance(value, FunctionType | type):
        return f"{value.__module__}.{value.__qualname__}" if _is_installed(value) else value.__qualname__
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"{type(value).__qualname__} of {len(value)}"
    if isinstance(value, PLAIN) or _is_installed(type(value)):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return type(value).__qualname__


def _parts(value: Any) -> Iterator[Part]:
    if isinstance(value, FunctionType | type) and _is_installed(value):
        return
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, dict):
        yield from ((str(i), item) for i, item in enumerate(value.items()))
    elif isinstance(value, set | frozenset):
        yield from (("", item) for item in value)  # lines are sorted
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif not _is_installed(type(value)):
        yield "class", type(value)
        yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _of_function(function: FunctionType) -> Iterator[Part]:
    """The function's text, the values of its defaults, and the names that it and its inner functions may take from
    enclosing scopes."""
    where = function.__qualname__
    try:
        yield where, inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interpreter
        yield where, re.sub(r" at 0x\w+", "", repr((function.__code__.co_code, function.__code__.co_consts)))
    yield from ((f"{where}.{name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield f"{where} defaults", function.__defaults__
    around = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    yield from _found(_named(function.__code__), {**function.__globals__, **around}, where)


def _found(names: set[str], scope: Mapping[str, Any], where: str) -> Iterator[Part]:
    """The values of names, and those in modules that are among them: attributes are names of the code, too."""
    for name in sorted(names & scope.keys()):
        value = scope[name]
        if not isinstance(value, ModuleType):
            yield f"{where}.{name}", value
        elif not _is_installed(value):
            yield from _found(names - {name}, vars(value), f"{where}.{name}")


def _of_class(made: type) -> Iterator[Part]:
    """Its methods and values, and those of the classes that it is made from."""
    yield "bases", made.__bases__
    for name, value in vars(made).items():
        if isinstance(_plain(value), FunctionType) or not name.startswith("__"):
            yield f"{made.__qualname__}.{name}", value


def _named(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_named, inner))


def _is_installed(value: FunctionType | type | ModuleType) -> bool:
    """Whether its text is known by a version: of an installed package, of Python, or of this project."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if f"{name}.".startswith("tilescale."):
        return True
    module = value if isinstance(value, ModuleType) else sys.modules.get(name)
    file = value.__code__.co_filename if isinstance(value, FunctionType) else getattr(module, "__file__", None)
    if file is None:  # Python's own; or a module that was typed in, or is nowhere
        return module is not None and name != "__main__"
    folders = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sys.prefix + "/lib")
    return file.startswith(tuple(folders))
