# SPDX-License-Identifier: MIT
"""Collectives of tiles inside nodes and along rails: their lowered kernels, executed, have the emulator's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.lowered_ranks import Job
from tests.cuda.support import lowered
from tilescale.backends.cuda.lowering.implemented import BETWEEN
from tilescale.backends.cuda.nvshmem_link import IMPL
from tilescale.settings import settings

BLOCKS, COLUMNS = 2, 3
OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.fixture(params=[(2, 2), (3, 2), (2, 3)], ids=str)
def nodes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nodes, devices of each, and the description, which is in force in a job with NVSHMEM's heap."""
    monkeypatch.setenv("TILESCALE_HEAP", IMPL)
    settings.cache_clear()
    count, local = request.param
    path = tmp_path / "nodes.yaml"
    path.write_text(f"extends: h200-sxm-8x4\nlevels:\n  node:\n    count: {count}\n  device:\n    count: {local}\n")
    with tilescale.use_machine(str(path)):
        yield count, local, str(path)
    settings.cache_clear()


def twice(
    operation: str, ranks: int, level: str, *, dtype: str = "bfloat16", rows: int = 0, impl: str | None = BETWEEN
) -> Any:
    """A collective of tiles three times in a loop, the next one on what the one before has left."""
    rows = rows or 2 * ranks
    part = rows // ranks
    source = rows if operation in ("allreduce", "reduce_scatter", "all_to_all", "broadcast") else part
    target = part if operation == "reduce_scatter" else rows

    @T.prim_func
    def collective(X: T.Tensor((3, BLOCKS, source, COLUMNS), dtype), Y: T.Tensor((3, BLOCKS, target, COLUMNS), dtype)):
        with T.Kernel(device=ranks, block=BLOCKS, threads=32) as bx:
            given = T.alloc((source, COLUMNS), dtype, level=level)
            taken = T.alloc((target, COLUMNS), dtype, level=level)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                for turn in T.serial(3):
                    T.copy(X[turn, bx, 0, 0], given)
                    if operation == "allreduce":
                        T.allreduce(given, impl=impl)
                        T.copy(given, Y[turn, bx, 0, 0])
                    elif operation == "broadcast":
                        T.broadcast(given, root=(turn + 1) % size, impl=impl)
                        T.copy(given, Y[turn, bx, 0, 0])
                    else:
                        if operation == "reduce_scatter":
                            T.reduce_scatter(given, taken, impl=impl)
                        elif operation == "all_gather":
                            T.all_gather(given, taken, impl=impl)
                        else:
                            T.all_to_all(given, taken, impl=impl)
                        T.copy(taken, Y[turn, bx, 0, 0])

    return collective


@pytest.mark.parametrize("operation", OPERATIONS)
def test_they_have_the_emulators_bits(operation: str, nodes: Any):
    count, local, machine = nodes
    ranks, level = count * local, "l0" if count == 3 and operation != "broadcast" else "l1"
    func = twice(operation, ranks, level)
    made = lowered(func, machine)
    assert f"T.{operation} of level 'device': {BETWEEN} through device memory inside, {IMPL} between" in made.notes
    shapes = [tuple(int(n) for n in p.shape) for p in made.lowered.program.parameters]
    generator = torch.Generator().manual_seed(count)
    args = [[torch.randn(s, generator=generator).bfloat16() for s in shapes] for _ in range(ranks)]
    import ml_dtypes

    arrays = [[x.float().numpy().astype(ml_dtypes.bfloat16) for x in mine] for mine in args]
    Job(made.kernels[0], ranks, local).run(arrays)
    report = tilescale.emulate(func, args)
    assert {span.name for span in report.timeline.spans if span.kind == "collective"} == {f"{operation} ({BETWEEN})"}
    for rank in range(ranks):
        found = torch.from_numpy(arrays[rank][1].astype("float32"))
        assert found.equal(args[rank][1].float()), f"rank {rank}"
