# SPDX-License-Identifier: MIT
"""Collectives of tiles inside nodes and along rails: their lowered kernels, executed, have the emulator's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.lowered_ranks import Job
from tests.cuda.support import lowered
from tilescale.backends.tilelang.lowering.implemented import BETWEEN
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.settings import settings

BLOCKS, COLUMNS, TURNS = 2, 2, 3
OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SMALL = 2
"""Rows of a part."""


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a description of a number of nodes and devices a node, for a job with NVSHMEM's heap; return its path."""
    monkeypatch.setenv("TILESCALE_HEAP", IMPL)
    settings.cache_clear()

    def made(nodes: int, devices: int) -> str:
        path = tmp_path / "nodes.yaml"
        levels = f"levels:\n  node:\n    count: {nodes}\n  device:\n    count: {devices}\n"
        path.write_text(f"extends: h200-sxm-8x4\n{levels}", encoding="utf-8")
        return str(path)

    yield made
    settings.cache_clear()


def in_turns(operation: str, ranks: int, level: str, rows: int = SMALL, impl: str | None = BETWEEN) -> Any:
    """A collective of tiles several times: those that follow use the same halves of workspaces as those before."""
    source = rows if operation == "all_gather" else rows * ranks
    target = rows if operation == "reduce_scatter" else rows * ranks

    @T.prim_func
    def collective(
        X: T.Tensor((TURNS, BLOCKS, source, COLUMNS), "bfloat16"),
        Y: T.Tensor((TURNS, BLOCKS, target, COLUMNS), "bfloat16"),
    ):
        with T.Kernel(device=ranks, block=BLOCKS, threads=32) as bx:
            given = T.alloc((source, COLUMNS), "bfloat16", level=level)
            taken = T.alloc((target, COLUMNS), "bfloat16", level=level)
            with T.Scale("block"), T.Scale("device") as (_, size):
                for turn in T.serial(TURNS):
                    T.copy(X[turn, bx, 0, 0], given)
                    if operation == "allreduce":
                        T.allreduce(given, impl=impl)
                        T.copy(given, taken)
                    elif operation == "broadcast":
                        T.broadcast(given, root=(turn + 1) % size, impl=impl)
                        T.copy(given, taken)
                    elif operation == "reduce_scatter":
                        T.reduce_scatter(given, taken, impl=impl)
                    elif operation == "all_gather":
                        T.all_gather(given, taken, impl=impl)
                    else:
                        T.all_to_all(given, taken, impl=impl)
                    T.copy(taken, Y[turn, bx, 0, 0])

    return collective


@pytest.mark.parametrize(
    ("operation", "nodes", "devices", "level"),
    [*((name, 3, 2, "l1") for name in OPERATIONS), ("allreduce", 2, 3, "l0"), ("all_to_all", 2, 2, "l0")],
)
def test_they_have_the_emulators_bits(operation: str, nodes: int, devices: int, level: str, describe: Any):
    ranks, machine = nodes * devices, describe(nodes, devices)
    with tilescale.use_machine(machine):
        func = in_turns(operation, ranks, level)
        made = lowered(func, machine)
        shapes = [[int(n) for n in p.shape] for p in made.lowered.program.parameters]
        args = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(ranks)]
        arrays = [[x.float().numpy().astype(ml_dtypes.bfloat16) for x in mine] for mine in args]
        report = tilescale.emulate(func, args)
    assert {span.name for span in report.timeline.spans if span.kind == "collective"} == {f"{operation} ({BETWEEN})"}
    Job(made.kernels[0], ranks, devices).run(arrays)
    for rank in range(ranks):
        assert torch.from_numpy(arrays[rank][1].astype("float32")).equal(args[rank][1].float()), f"rank {rank}"


def composed(a: Any, b: Any) -> Any:
    """Compose two maps x -> offset + slope * x. The composition is not commutative, so the order of ranks counts."""
    return a[0] + a[1] * b[0], a[1] * b[1]


@pytest.mark.parametrize(("nodes", "devices", "level"), [(3, 2, "l1"), (2, 2, "l0")])
def test_tiles_that_belong_together_have_the_emulators_bits(nodes: int, devices: int, level: str, describe: Any):
    """A tile of two dimensions and one of one dimension are combined as a pair."""
    ranks, machine, rows = nodes * devices, describe(nodes, devices), SMALL * devices

    @T.prim_func
    def compose(X: T.Tensor((TURNS, rows, COLUMNS), "float32"), W: T.Tensor((TURNS, rows), "float32")):
        with T.Kernel(device=ranks, block=1, threads=32):
            tile, weights = T.alloc((rows, COLUMNS), "float32", level=level), T.alloc((rows,), "float32", level=level)
            with T.Scale("block"), T.Scale("device"):
                for turn in T.serial(TURNS):
                    T.copy(X[turn, 0, 0], tile)
                    T.copy(W[turn, 0], weights)
                    T.allreduce(tile, weights, fn=composed, impl=BETWEEN)
                    T.copy(tile, X[turn, 0, 0])
                    T.copy(weights, W[turn, 0])

    with tilescale.use_machine(machine):
        made = lowered(compose, machine)
        args = [[torch.randn(TURNS, rows, COLUMNS), torch.rand(TURNS, rows) + 0.5] for _ in range(ranks)]
        arrays = [[x.numpy().copy() for x in mine] for mine in args]
        wanted = args[-1][0].double()
        for offset, slope in args[-2::-1]:
            wanted = offset + slope[..., None] * wanted
        tilescale.emulate(compose, args)
    Job(made.kernels[0], ranks, devices).run(arrays)
    for rank in range(ranks):
        for found, emulated in zip(arrays[rank], args[rank], strict=True):
            assert torch.from_numpy(found).equal(emulated), f"rank {rank}"
    torch.testing.assert_close(args[0][0].double(), wanted, rtol=1e-5, atol=1e-5)


def noted(func: Any, machine: str) -> str:
    """Remark of the schedule on a program's collective."""
    return lowered(func, machine).notes[0]


def test_the_machine_model_chooses(describe: Any):
    machine = describe(4, 8)
    with tilescale.use_machine(machine):
        large, small = (in_turns("allreduce", 32, "l1", rows, None) for rows in (512, 1))
        assert noted(large, machine) == (
            f"T.allreduce of level 'device': {BETWEEN} through device memory inside, {IMPL} between"
        )
        assert "one_shot through nvshmem" in noted(small, machine), "one barrier in place of three"


def test_what_cannot_be_shared_out_goes_straight(describe: Any):
    machine = describe(2, 3)
    with tilescale.use_machine(machine):

        @T.prim_func
        def odd(X: T.Tensor((8192, 1), "float32")):
            with T.Kernel(device=6, block=1, threads=32):
                tile = T.alloc((8192, 1), "float32", level="l1")
                with T.Scale("block"), T.Scale("device"):
                    T.copy(X, tile)
                    T.allreduce(tile)
                    T.copy(tile, X)

        assert "one_shot through nvshmem" in noted(odd, machine)
