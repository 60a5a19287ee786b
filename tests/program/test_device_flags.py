# SPDX-License-Identifier: MIT
"""Flags whose scope is the device: workspaces that only its own units signal."""

from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tilescale.hda import Machine
from tilescale.passes.mod_analysis import device_flags
from tilescale.passes.pipeline import analyse

MACHINE = Machine.load("h200-sxm-8")


@T.prim_func
def local(X: T.Tensor((8,), "float32")):
    with T.Kernel(device=2, block=2, threads=32) as block:
        flags = T.alloc_flags((2,))
        T.signal(flags[block], 1)
        T.wait(flags[1 - block], ">=", 1)
        for i in T.Parallel(4):
            X[block * 4 + i] = 1


@T.prim_func
def of_the_caller(X: T.Tensor((8,), "float32"), flags: T.Tensor((2,), "int32")):
    with T.Kernel(device=2, block=2, threads=32) as block:
        T.signal(flags[block], 1)
        T.wait(flags[1 - block], ">=", 1)
        for i in T.Parallel(4):
            X[block * 4 + i] = 1


@T.prim_func
def of_peers(X: T.Tensor((8,), "float32")):
    with T.Kernel(device=2, block=2, threads=32) as block:
        flags = T.alloc_flags((2,))
        T.signal(flags[block], 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.signal(flags[block], 1, dst=1 - rank)
        T.wait(flags[1 - block], ">=", 2)
        for i in T.Parallel(4):
            X[block * 4 + i] = 1


@pytest.mark.parametrize(("func", "names"), [(local, ["flags"]), (of_the_caller, []), (of_peers, [])])
def test_flags_of_one_device_are_found(func: Any, names: list[str]):
    program = analyse(func, MACHINE)
    found = device_flags(program)
    assert [b.name for launch in program.launches for b in launch.buffers if b.data in found] == names


@pytest.mark.parametrize(("func", "is_local"), [(local, True), (of_the_caller, False), (of_peers, False)])
def test_their_scope_is_the_device(func: Any, is_local: bool):
    text = tilescale.compile(func, machine=MACHINE).source
    body = text[text.rindex("__global__") :]
    assert ("tilescale::signal<0, int, tilescale::DEVICE>" in body) == is_local
    assert ("tilescale::wait<tilescale::GE, int, tilescale::DEVICE>" in body) == is_local
