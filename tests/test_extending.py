# SPDX-License-Identifier: MIT
"""Additions need the files that docs/notes/extending.md names, and no other: a program makes them from outside."""

import os
import subprocess
import sys
from pathlib import Path

ALGORITHM = """
import numpy as np

from tilescale.collectives.record import FORMS, Algorithm
from tilescale.collectives.round_schedule import Round, RoundSchedule


def allreduce(shape):
    units = int(np.prod(shape))
    others, root = np.arange(1, units), np.zeros(units - 1, int)
    return RoundSchedule("allreduce", units, 1, (Round.of(others, root, combine=True), Round.of(root, others)))


ALGORITHMS = (Algorithm(name="star", title="All to one, one to all.", schedules={"allreduce": allreduce}, forms=FORMS),)
"""

MECHANISM = """
from tilescale.backends.tilelang.lowering.copies.peer_memory import RemoteCopy
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.program import ops


@lowers(ops.COPY.name, impl="wide")
def by_wide_stores(stage, call):
    return RemoteCopy.of(stage, call).made("copy", disable_tma=1)
"""

MACHINE = """
extends: h200-sxm-8
title: H200 with another mechanism
networks:
  nvlink:
    mechanisms:
      wide: {put: 0.1 GB/s, source: made up}
"""

PROGRAM = """
import torch

from tilescale.collectives import algorithms

algorithms.__path__.append("algorithms")

from tilescale.backends.tilelang.lowering import copies

copies.__path__.append("copies")

import tilescale
import tilescale.language as T

@T.prim_func
def program(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
    with T.Kernel(device=4, block=1, threads=128):
        with T.Scale("block"), T.Scale("device") as (rank, size):
            tile = T.alloc((64, 64), "float32", level="l1")
            T.copy(X, tile)
            T.copy(tile, Y, dst=(rank + 1) % size, impl="wide")
        with T.Scale("device"):
            T.allreduce(X, impl="star")


tensors = [[torch.full((64, 64), float(rank)), torch.zeros(64, 64)] for rank in range(4)]
report = tilescale.emulate(program, tensors, machine="wide.yaml")
print([int(x[0, 0]) for x, _ in tensors], [int(y[0, 0]) for _, y in tensors])
assert report.time_us > 160  # 16 KiB at 0.1 GB/s
kernel = tilescale.compile(program, machine="wide.yaml", target="cuda")
kernel.get_kernel_source()
print(kernel.schedule)
"""


def test_an_algorithm_and_a_mechanism_are_a_file_each(tmp_path: Path):
    files = {"algorithms/star.py": ALGORITHM, "copies/wide.py": MECHANISM, "wide.yaml": MACHINE, "program.py": PROGRAM}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TILESCALE_MACHINE": "wide.yaml"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "[6, 6, 6, 6] [3, 0, 1, 2]" in done.stdout
    assert "T.copy(tile, Y, dst=): wide (asked for)" in done.stdout
    assert "T.allreduce of X between devices: star (asked for)" in done.stdout
