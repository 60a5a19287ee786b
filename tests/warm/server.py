# SPDX-License-Identifier: MIT
"""Forks a process for every client: server.py FOLDER [TESTS...]. Ends when no process has its pipe `users` open."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import locale
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor  # noqa: F401

import tilescale.backends.cuda
import tilescale.backends.emulator
import tilescale.cli.run
import tilescale.language
import tilescale.ops  # noqa: F401 - all of these are loaded for the processes
from tests.shared_programs import share
from tilescale.settings import settings

OPTIONS = {"-u", "-B"}
"""Python's own options, without effect here: streams are unbuffered by the environment, bytecode is there."""

FIRST_FREE = 1000  # where descriptors are kept while they are put in place
_PR_SET_PDEATHSIG = 1


class Server:
    """Waits for clients, for the ends of the processes that were forked for them, and for its own."""

    def __init__(self, folder: Path):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "server"))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        users = os.open(folder / "users", os.O_RDONLY)
        self._selector.register(users, selectors.EVENT_READ, lambda: sys.exit(0))

    def serve(self) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # else an event before it has ended its process
                    key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        length, fds, _, _ = socket.recv_fds(connection, 8, 253)
        asked = json.loads(connection.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            become(asked, fds)
        for fd in fds:
            os.close(fd)
        end = os.pidfd_open(pid)
        connection.sendall(pid.to_bytes(8, "little"))

        def ended() -> None:
            _, status = os.waitpid(pid, 0)
            for watched in (end, connection):
                self._selector.unregister(watched)
            try:
                connection.sendall(status.to_bytes(8, "little"))
            except OSError:
                pass  # the client has been killed
            connection.close()
            os.close(end)

        def abandoned() -> None:
            os.kill(pid, signal.SIGKILL)  # as its client was

        self._selector.register(end, selectors.EVENT_READ, ended)
        self._selector.register(connection, selectors.EVENT_READ, abandoned)


def become(asked: dict[str, Any], fds: list[int]) -> None:
    """Be the process that a client asks for, up to its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        _take(fds, asked["fds"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        settings.cache_clear()
        sys.executable = asked["executable"]
        multiprocessing.set_executable(sys.executable)  # it has taken this process's at its import
        sys.path[:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        _open_streams()
        random.seed()
        numpy.random.seed()
        code = _code_of(asked["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _take(fds: list[int], numbers: list[int]) -> None:
    """Have these descriptors under these numbers, and no others."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE) for fd in fds]
    os.closerange(0, FIRST_FREE)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _open_streams() -> None:
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", locale.getpreferredencoding()).partition(":")
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        strict = "backslashreplace" if fd == 2 else errors or "strict"
        stream = open(fd, mode, encoding=encoding, errors=strict, closefd=False)
        if mode == "w":
            stream.reconfigure(line_buffering=fd == 2, write_through="PYTHONUNBUFFERED" in os.environ)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _code_of(arguments: list[str]) -> int:
    """The exit code of what a Python with these arguments runs, after all that Python does at its end."""
    code = 0
    try:
        _run(list(dropwhile(OPTIONS.__contains__, arguments)))
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _run(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = arguments
        main.__file__ = kind
        sys.path.insert(0, str(Path(kind).resolve().parent))
        code = compile(Path(kind).read_bytes(), kind, "exec", dont_inherit=True)
    exec(code, main.__dict__)


class Failures:
    """A plugin of pytest. `files`: those that cannot be collected."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.fspath:
            self.files.add(str(Path(report.fspath).resolve()))


def load(tests: list[str]) -> None:
    """Load the modules of tests. Those that fail are loaded again by the workers, which report it: pytest would take
    what has been loaded of such a module for all of it."""
    if tests:
        failures = Failures()
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *tests], [failures])
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in failures.files:
                del sys.modules[name]


if __name__ == "__main__":
    load(sys.argv[2:])
    share(Path(sys.argv[1]))
    Server(Path(sys.argv[1])).serve()
