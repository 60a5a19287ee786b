# SPDX-License-Identifier: MIT
"""Loops that only send: what is in flight when, and that the text means the program."""

import re
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, lowered, source
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel

HIGH, WIDE = 32, 64


def sending(turns: int, columns: int = 2, *, blocks: int = 1, begin: int = 0, dtype: str = "float16") -> Any:
    """Send every local tile of X to the next device, and raise a flag after it."""
    count = turns * blocks

    @T.prim_func
    def run(
        X: T.Tensor((count * HIGH, columns * WIDE), dtype),
        Y: T.Tensor((count * HIGH, columns * WIDE), "float16"),
        flags: T.Tensor((count,), "int32"),
    ):
        with T.Kernel(device=T.ALL, block=blocks, threads=128) as block:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((HIGH, WIDE), "float16", level="l1")
                for turn in T.serial(T.ceildiv(count - block, blocks)):
                    number = block + turn * blocks
                    T.copy(X[number * HIGH, begin], tile)
                    T.copy(tile, Y[number * HIGH, WIDE], dst=(rank + 1) % size, impl="tma", signal=flags[number])

    return run


def counted(kernel: LoweredKernel) -> Any:
    """The plain TileLang function that a kernel is, its signals plain additions."""

    def enter(node: Any) -> Any:
        if not isinstance(node, ir.Evaluate) or not tir.is_extern(node.value):
            return None
        if not tir.extern_name(node.value).startswith("tilescale::signal<"):
            return tir.sequence([])
        _, address, index, *_ = node.value.args
        flag = ir.BufferLoad(address.args[0].buffer, [0, index])
        return ir.BufferStore(flag.buffer, flag + 1, list(flag.indices))

    return kernel.func.with_body(tir.rewrite(kernel.func.body, enter=enter))


def interpreted(func: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and flags of a device that sends to itself."""
    (kernel,) = lowered(func, devices=1).kernels
    given = {0: x, 1: torch.full((1, *x.shape), torch.nan, dtype=torch.float16)}
    given[2] = torch.zeros(1, len(x) // HIGH, dtype=torch.int32)

    def value(argument: Any, buffer: ir.Buffer | None) -> Any:
        if isinstance(argument, arg.CallerArgument | arg.PeerInstances):
            return given[argument.position]
        return 0 if buffer is None else torch.zeros(ir.constants(buffer.shape), dtype=torch.int64)

    parameters = zip(kernel.arguments, ir.parameters(kernel.func), strict=True)
    tilescale.emulate(counted(kernel), [value(argument, buffer) for argument, (_, buffer) in parameters])
    return given[1][0], given[2][0]


@pytest.mark.parametrize("begin", [0, 8, 3])
@pytest.mark.parametrize("turns", [1, 3, 4, 5, 9])
def test_the_text_means_the_program(turns: int, begin: int):
    x = torch.randn(2 * turns * HIGH, 2 * WIDE).half()
    y, flags = interpreted(sending(turns, blocks=2, begin=begin), x)
    assert torch.equal(y[:, WIDE:], x[:, begin : begin + WIDE]) and y[:, :WIDE].isnan().all()
    assert (flags == 1).all()


def loop(func: Any) -> str:
    """The sending loop of a program's text."""
    text = bodies(source(func))
    return text[text.index("for (int turn") :]


def test_a_tile_is_loaded_while_the_one_before_is_sent():
    found = re.findall(r"cp_async_(?:wait<\d>|commit)|complete_stores<\d>|tma_store(?=\()", loop(sending(9)))
    # The last tile has no successor. Four slots: two sends are in flight when a slot is loaded again.
    loads = ["complete_stores<2>", "cp_async_commit", "cp_async_wait<1>"]
    assert found == ["cp_async_wait<0>", *loads, "tma_store", "complete_stores<0>"]


@pytest.mark.parametrize("how", [{"begin": 3}, {"dtype": "float32"}], ids=["odd places", "a conversion"])
def test_other_loads_come_before_what_sends_them(how: dict[str, Any]):
    text = loop(sending(9, **how))
    assert "cp_async" not in text and "complete_stores<3>" in text
