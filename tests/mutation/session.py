# SPDX-License-Identifier: MIT
"""Tests that are collected once, in a process that forks for each mutant: a fork imports and collects nothing.

In the fork the mutant's code replaces that of the loaded functions. The tests that reach the mutant's line run first,
and of them the quickest. A line that is reached while modules are imported needs a new process, as their values stay.
So does a line of a function that TileLang rewrites: the rewritten one is kept.
"""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.table import CAUGHT, SURVIVES, TIMEOUT

CPU_LIMIT_S, LIMIT_S = 120, 300
"""Limits of CPU and wall-clock time for the tests of one mutant, which may wait: many times their usual time."""

REWRITES = ("macro", "prim_func")
"""Decorators of functions that TileLang rewrites."""

_FUNCTION = 0x1
"""Flag of the code of functions, not of classes and modules (CO_OPTIMIZED)."""


def outcome_of(tests: tuple[str, ...], tree: Path) -> str:
    """Outcome of the tests of a tree in a new process: it survives if all pass, is caught if one fails."""
    process = os.fork()
    if not process:
        _limit()
        _exit_with_tests(tests, tree)
    return _outcome(process)


class Session:
    """The tests of a file of a tree, collected.

    Attributes:
        passes: whether they pass as the tree is.
    """

    def __init__(self, tests: tuple[str, ...], path: Path, tree: Path):
        self._asked, theirs = multiprocessing.Pipe()
        self._process = os.fork()
        if not self._process:
            self._asked.close()
            _exit_with_tests(tests, tree, _Mutants(path, path.read_text(encoding="utf-8"), theirs))
        theirs.close()
        self.passes = self._received() == SURVIVES

    def outcome(self, line: int, text: str) -> str | None:
        """The outcome of a text of the file that differs at a line; None if that takes a new process."""
        self._asked.send((line, text))
        return self._received()

    def close(self) -> None:
        self._asked.close()
        os.waitpid(self._process, 0)

    def _received(self) -> str | None:
        try:
            return self._asked.recv()
        except EOFError:
            return CAUGHT  # not even collected


@dataclass
class _Mutants:
    """Plugin of pytest: in place of one run of the collected tests, one for each mutant that is asked for.

    Attributes:
        path, text: the mutated file, and what it is without mutants.
        imported: its lines that are reached before any test runs.
        reached: for each test, by its name, its seconds and the lines of the file that it reaches.
        known: where to send them; None unless tests are measured.
    """

    path: Path
    text: str
    asked: Connection
    imported: set[int] = field(default_factory=set)
    reached: dict[str, tuple[float, set[int]]] = field(default_factory=dict)
    known: Connection | None = None

    def __post_init__(self) -> None:
        _trace(str(self.path), self.imported)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Serve requests until their pipe is closed; return None in a fork, where pytest then runs the tests."""
        sys.settrace(None)
        receiver, self.known = multiprocessing.Pipe(duplex=False)
        process = os.fork()
        if not process:
            _limit()
            return None
        self.known.close()
        self.known = None
        try:
            self.reached = receiver.recv()
        except EOFError:
            pass  # a test has failed
        self.asked.send(_outcome(process))
        rewritten = _rewritten(self.text) if self.path.suffix == ".py" else set()
        for line, text in iter(self._next, None):
            codes = _new_codes(self.path, self.text, text)
            if codes is None or line in self.imported | rewritten:
                self.asked.send(None)
                continue
            process = os.fork()
            if not process:
                _limit()
                session.items.sort(key=lambda item: self._rank(item, line))
                _replace(codes)
                return None
            self.asked.send(_outcome(process))
        return True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures a test, if tests are measured."""
        if self.known is None:
            yield
            return
        begin, lines = time.perf_counter(), set[int]()
        _trace(str(self.path), lines)
        yield
        sys.settrace(None)
        self.reached[item.nodeid] = time.perf_counter() - begin, lines

    def pytest_sessionfinish(self) -> None:
        """Sends what was measured."""
        if self.known is not None:
            self.known.send(self.reached)

    def _next(self) -> Any:
        try:
            return self.asked.recv()
        except EOFError:
            return None

    def _rank(self, item: pytest.Item, line: int) -> tuple[bool, float]:
        seconds, lines = self.reached[item.nodeid]
        return line not in lines, seconds


def _trace(path: str, lines: set[int]) -> None:
    """From now on add the lines of a file that this thread and new ones execute."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != path or not frame.f_code.co_flags & _FUNCTION:
            return None
        lines.add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def _new_codes(path: Path, old: str, new: str) -> dict[CodeType, CodeType] | None:
    """The code of a file's functions, and that in a new text; None if loaded functions cannot have it."""
    if path.suffix != ".py":
        return {}
    codes = [_functions(compile(text, str(path), "exec", dont_inherit=True)) for text in (old, new)]
    pairs = list(zip(*codes, strict=True))
    return dict(pairs) if all(a.co_freevars == b.co_freevars for a, b in pairs) else None


def _rewritten(text: str) -> set[int]:
    """Lines of functions of a module that TileLang rewrites."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    decorated = [f for f in functions if any(ast.unparse(d).endswith(REWRITES) for d in f.decorator_list)]
    return {line for f in decorated for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)}


def _replace(codes: Mapping[CodeType, CodeType]) -> None:
    """Give loaded functions their new code."""
    gc.unfreeze()
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__ in codes:
            function.__code__ = codes[function.__code__]


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The code of functions in a module, in order, without functions in functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & _FUNCTION:
                yield inner
            else:
                yield from _functions(inner)


# -- processes ---------------------------------------------------------------------------------------------------------


def _exit_with_tests(tests: tuple[str, ...], tree: Path, *plugins: Any) -> NoReturn:
    """Run pytest in this forked process, which exits with its code."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # One failing example is enough, without the smallest one; and a slow machine is not a failure.
        phases, ignored = [Phase.explicit, Phase.generate], list(HealthCheck)
        settings.register_profile("found", phases=phases, suppress_health_check=ignored, database=None)
        settings.load_profile("found")
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        alone = "-p", "no:cacheprovider", "--rootdir", str(tree)
        code = int(pytest.main(["-x", "-q", *alone, *tests], plugins=list(plugins)))
    finally:
        os._exit(code)


def _limit() -> None:
    """Put this process into a group of its own, and limit its CPU time."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))


def _outcome(process: int) -> str:
    """The outcome of tests that run in a forked process; its group ends with it."""
    watched = os.pidfd_open(process)
    is_late = not select.select([watched], [], [], LIMIT_S)[0]
    os.close(watched)
    for one in (process, -process):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if is_late or code == -signal.SIGXCPU:
        return TIMEOUT
    return CAUGHT if code else SURVIVES
