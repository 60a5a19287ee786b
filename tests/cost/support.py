# SPDX-License-Identifier: MIT
"""A calibration of a machine that does not exist, and where it is kept."""

from pathlib import Path

from tilescale.cost.measured import (
    Measured,
    MeasuredCollective,
    MeasuredContention,
    MeasuredFlag,
    MeasuredGemm,
    MeasuredLaunch,
    MeasuredTransfer,
)

CALIBRATION = Measured(
    machine="h200-sxm-8",
    gpu="imagined",
    units=2,
    date="2026-01-02T03:04:05+00:00",
    versions={"tilescale": "0.1.0"},
    source="imagined",
    wires=(
        *(
            MeasuredTransfer(mechanism="copy_engine", operation="put", nbytes=n, gb_s=n / (20e-6 + n / 200e9) / 1e9)
            for n in (1 << 16, 1 << 20, 1 << 28)
        ),
        MeasuredTransfer(mechanism="lsu", operation="put", gb_s=20.0, programs=1, spread=(19.0, 21.0)),
    ),
    flags=(MeasuredFlag(nbytes=0, us=2.5),),
    launches=(MeasuredLaunch(mode="graph", us=1.5),),
    products=(MeasuredGemm(shape=(4096, 4096, 4096), dtype="bfloat16", by="cublas", us=250.0),),
    collectives=(MeasuredCollective(operation="allreduce", algorithm="nccl", units=2, nbytes=4096, us=10.0),),
    contention=(MeasuredContention(mechanism="copy_engine", shape=(4096, 4096, 4096), dtype="bfloat16", ratio=1.04),),
)


def keep(cache: Path, data: Measured) -> None:
    """Write a calibration to where a user's are."""
    folder = cache / "calibrations"
    folder.mkdir(exist_ok=True)
    (folder / f"{data.machine}-{data.date[:10]}.json").write_text(data.text)
