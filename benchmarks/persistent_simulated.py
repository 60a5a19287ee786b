# SPDX-License-Identifier: MIT
"""A decode step of a decoder layer as one launch and in order, simulated: `python benchmarks/persistent_simulated.py`.

A layer of Llama 3 8B with 1024 cached tokens, tensor-parallel over 8 GPUs, or over 8 vaults of stacked memory. A core
of the wafer owns its tensors, so all phases there are one launch, and a core holds the weights of a small MLP alone.
Writes the times to `benchmarks/results/`; `docs/one-launch.md` has their table.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tilescale  # noqa: E402 - found through the path above
import tilescale.language as T  # noqa: E402
from tilescale import hda  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.current import use_machine  # noqa: E402
from tilescale.ops.decode_program import decode_layers  # noqa: E402
from tilescale.ops.decode_sizes import LayerSizes  # noqa: E402
from tilescale.timing.rates import bandwidth  # noqa: E402
from tilescale.tuning.race import text_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "persistent_simulated.json"
UNITS, BATCHES, SIDE = 8, (1, 16), 16
"""Devices or vaults; sequences; cores of a side of the wafer's square."""

FEATURES, INNER = 512, 8
"""Features of the wafer's MLP, and those between its products on each core."""

SCHEDULES = {"one launch": "persistent", "in order": "sequential"}
MACHINES, WAFER = ("h100-sxm-8", "h200-sxm-8", "stacked-3d"), "wafer-mesh"


def by_device_and_block(name: str) -> Machine:
    """A machine whose unit with tensors is named "device", and its program "block", as in the program of layers."""
    machine = Machine.load(name)
    names = {machine.tensor_level.name: "device", machine.program_level.name: "block"}
    if all(before == after for before, after in names.items()):
        return machine
    text = (Path(hda.__file__).parent / "machines" / f"{name}.yaml").read_text(encoding="utf-8")
    for before, after in names.items():
        text = re.sub(rf"\b{before}\b", after, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return Machine.load(path)


def layer(machine: Machine, batch: int) -> dict[str, float]:
    """Contender -> microseconds of a decoder layer."""
    blocks = machine.count("block", "device")
    heads, groups, inner = (n // UNITS for n in (32, 8, 14336))
    s = LayerSizes(batch, UNITS, heads=heads, groups=groups, inner=inner, blocks=blocks)
    weights = 2 * s.hidden * (s.projected + s.heads * s.width + 3 * s.inner)
    full = {"lengths": torch.full((batch,), s.keys - 1, dtype=torch.int32)}
    times = {"weights read once": reading(machine, weights)}
    for contender, schedule in SCHEDULES.items():
        with use_machine(machine):
            program = tilescale.compile(decode_layers(s), machine=machine, schedule=schedule).ir
        times[contender] = simulated(program, machine, assume=full)
    return times


def mlp(batch: int) -> Any:
    """An MLP over a square of cores: each has some of the features between the two products."""
    hidden, inner = FEATURES, INNER

    @T.prim_func
    def program(
        X: T.Tensor((batch, hidden), "bfloat16"),
        up: T.Tensor((2 * inner, hidden), "bfloat16"),
        down: T.Tensor((hidden, inner), "bfloat16"),
        Y: T.Tensor((batch, hidden), "bfloat16"),
    ):
        with T.Kernel(core=(SIDE, SIDE)), T.Scale("core"):
            both = T.alloc((batch, 2 * inner), "float32", level="l0")
            gated = T.alloc((batch, inner), "bfloat16", level="l0")
            y = T.alloc((batch, hidden), "float32", level="l0")
            T.clear(both)
            T.gemm(X, up, both, transpose_B=True)
            for i, j in T.Parallel(batch, inner):
                gated[i, j] = both[i, j] / (1 + T.exp(-both[i, j])) * both[i, inner + j]
            T.clear(y)
            T.gemm(gated, down, y, transpose_B=True)
            T.copy(y, Y)
            T.allreduce(Y)

    return program


def on_wafer(batch: int) -> dict[str, float]:
    """Contender -> microseconds of the MLP; no launch is left to fuse."""
    machine = Machine.load(WAFER)
    with use_machine(machine):
        program = mlp(batch)
    weights = 2 * 3 * FEATURES * INNER
    return {"weights read once": reading(machine, weights), "in order": simulated(program, machine)}


def reading(machine: Machine, nbytes: int) -> float:
    """Microseconds to read some bytes of a unit's memory."""
    return nbytes / bandwidth(machine.layer_for("global")) * 1e6


def simulated(program: Any, machine: Machine, **more: Any) -> float:
    """Microseconds."""
    return tilescale.emulate(program, machine=machine, data=False, progress=False, **more).time_us


def rows(machine: str, work: str, units: int, batch: int, times: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of one work."""
    baseline = next(iter(times))
    return [
        {
            "work": work, "machine": machine, "units": units, "batch": batch, "contender": contender,
            "us": round(us, 2), "baseline": baseline, "ratio": round(us / times[baseline], 4),
        }
        for contender, us in times.items()
    ]  # fmt: skip


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--only", metavar="TEXT", default="", help="Simulate machines whose name contains this; others stay.")
def main(only: str) -> None:
    """Simulate all, and write the results."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    found = [row for row in known if only not in row["machine"]]
    for name in filter(lambda name: only in name, (*MACHINES, WAFER)):
        is_wafer = name == WAFER
        work, units = ("MLP of 512 features", SIDE**2) if is_wafer else ("layer of Llama 3 8B", UNITS)
        for batch in BATCHES:
            times = on_wafer(batch) if is_wafer else layer(by_device_and_block(name), batch)
            found += rows(name, work, units, batch, times)
            click.echo(f"{name}, {batch} sequences: {times}")
    found.sort(key=lambda row: (*MACHINES, WAFER).index(row["machine"]))
    RESULTS.write_text(text_of({"source": "tilescale.emulate, data=False", "rows": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
