# SPDX-License-Identifier: MIT
"""Types that type checkers and editors see."""

import inspect
from pathlib import Path
from typing import get_args, get_overloads

import tilescale
import tilescale.language as T
from tilescale.hda.names import BuiltIn

ROOT = Path(__file__).parents[1]


def test_the_packages_are_typed():
    assert all((ROOT / package / "py.typed").exists() for package in ("tilescale", "tilelang_core"))


def test_editors_know_every_built_in_machine():
    assert get_args(BuiltIn) == tilescale.Machine.names()


def test_the_language_says_what_it_takes():
    """Decorators keep the parameters, and where a name means several things there is an overload for each."""
    assert list(inspect.signature(T.allreduce).parameters) == ["tiles", "op", "fn", "out", "impl", "wire"]
    assert list(inspect.signature(T.alloc_shared).parameters) == ["shape", "dtype", "scope"]
    assert [set(inspect.signature(f).parameters) for f in get_overloads(T.copy)] == [
        {"source", "target", "dst", "signal", "value", "op", "after", "impl"},
        {"source", "target", "src", "impl"},
        {"source", "target", "kwargs"},
    ]
    assert len(get_overloads(T.view)) == 2
