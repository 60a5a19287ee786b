# SPDX-License-Identifier: MIT
"""The choice of the back end that runs a program: by priority, availability, and errors of the lowering."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tilescale import backends
from tilescale.errors import InternalError, Location, TileScaleError, UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse


@T.prim_func
def copied(X: T.Tensor((64,), "float32"), Z: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        T.copy(X, Z)


PROGRAM = analyse(copied, Machine.load("h200-sxm-8"))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of the chosen back end, of `gpu` with an error for programs or none, and `cpu` without one."""

    def choose(error: TileScaleError | None, available: bool = True) -> str:
        def lower(backend: backends.Backend) -> Any:
            if backend.name == "gpu" and error is not None:
                raise error
            return backend.name

        able = {"gpu": available, "cpu": True}
        each = [backends.Backend(name, lambda name=name: able[name], lambda *_: None, 0) for name in able]
        monkeypatch.setattr(backends.base, "_BACKENDS", each)
        return backends.choose(PROGRAM, lower)

    return choose


def test_the_first_available_back_end_runs_a_program(chosen: Any):
    assert chosen(None) == "gpu"
    assert chosen(None, available=False) == "cpu"


def test_the_next_back_end_runs_what_one_does_not_support(chosen: Any):
    assert chosen(UnsupportedError("no such copy")) == "cpu"


def test_a_fault_of_an_available_back_end_is_raised_as_it_is(chosen: Any):
    """Another back end would hide it: a program for GPUs would run on the emulator."""
    fault = InternalError("TileScale failed", where=Location("program.py", 7))
    with pytest.raises(InternalError) as found:
        chosen(fault)
    assert found.value is fault
    assert chosen(fault, available=False) == "cpu"


def test_the_error_of_a_program_that_none_runs_has_all_reasons(monkeypatch: pytest.MonkeyPatch):
    def lower(backend: backends.Backend) -> Any:
        raise UnsupportedError(f"{backend.name} has no such copy", where=Location("program.py", 7))

    each = [backends.Backend(name, lambda name=name: name != "b", lambda *_: None, 0) for name in "abc"]
    monkeypatch.setattr(backends.base, "_BACKENDS", each)
    with pytest.raises(UnsupportedError, match="no back end runs 'copied': a: a has no such copy") as found:
        backends.choose(PROGRAM, lower)
    assert found.value.message.endswith(
        "(program.py:7); b: not available on this computer; c: c has no such copy (program.py:7)"
    )
