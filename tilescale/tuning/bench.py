# SPDX-License-Identifier: MIT
"""Benchmarks of TileScale on a machine: collectives and operators compared with NCCL, cuBLAS and PyTorch's symmetric
memory.

On GPUs operators are those of `tilescale.ops`. In simulation they are programs with `schedule="overlap"`, and NCCL is
the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from tilescale.hda.current import use_machine
from tilescale.runtime.compile import compile as compile_program
from tilescale.tuning import libraries, programs
from tilescale.tuning.inputs import InputFill
from tilescale.tuning.places import TimeSource
from tilescale.tuning.probes import KIB, MIB, OPERATIONS, TYPE
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import Contender, Heat, Runner, race
from tilescale.tuning.versions import versions

SIZES = tuple(4 * KIB << n for n in range(0, 17, 2))
"""Bytes of whole tensors, up to 256 MiB."""

PUT = 128 * MIB
"""Bytes of a put, which measures the link's bandwidth."""

ROWS = (8192, 4096, 2048, 1024, 256)
WIDE, NARROW = 8192, 3584
"""Shapes of GEMMs: rows of all units together, and the other two extents on each."""

GRAPHED = 256
"""Limit of rows below which GEMMs are called in a graph: they take less time than the host to launch them."""

FUSED_ROWS = 1024
"""Rows up to which PyTorch's fused operators take part: with more they did not end (PyTorch 2.11, no multicast)."""

OURS, NCCL, ALONE, SYMMETRIC = "tilescale", "nccl", "GEMM alone", "symm_mem"


def bench(
    place: TimeSource, steps: ProgressSteps, works: Sequence[str], *, quick: bool = False, rounds: int = 10
) -> dict[str, Any]:
    """Race at the named works, "collectives" or "operators"; collective. Returns the contents of a results file.

    Args:
        quick: few sizes: to see that it works.
        rounds: groups of calls of each contender.
    """

    def heats() -> Iterator[Heat]:
        return (heat for work in works for heat in WORKS[work](place, quick))

    steps.begin(sum(1 for _ in heats()), "")
    rows = []
    with use_machine(place.machine):
        for heat in heats():  # anew, so that each one's tensors go with it
            steps.step(f"{heat.work} {' x '.join(map(str, heat.shape))}, {heat.mode}")
            rows += race(heat, place.timer(heat.mode), place.team, 1 if place.simulated else rounds, seeds=range(1))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"machine": {"gpu": place.name, "gpus": place.units}, "versions": versions(), "date": date, "rows": rows}


# -- collectives -------------------------------------------------------------------------------------------------------


def collectives(place: TimeSource, quick: bool) -> Iterator[Heat]:
    """Every collective of whole tensors at every size, and a put before them."""
    yield from _put(place)
    for operation in OPERATIONS[:2] if quick else OPERATIONS:
        for nbytes in SIZES[::4] if quick else SIZES:
            yield _collective(place, operation, nbytes)


def _put(place: TimeSource) -> Iterator[Heat]:
    network = place.machine.network(place.machine.tensor_level.name)
    by_host = [m for m in network.mechanisms if m.started_by == "host" and m.put] if network is not None else []
    for name in [m.name for m in by_host[:1]]:
        copy = partial(programs.whole_copy, place.machine, place.units, PUT, name)
        entry = Contender(f"{OURS} {name}", partial(_run, place, copy))
        yield Heat("put", (PUT // 2,), TYPE, place.units, "graph", None, [entry], bytes=PUT, calls=2)


def _collective(place: TimeSource, operation: str, nbytes: int) -> Heat:
    n, fill = nbytes // 2 // place.units * place.units, InputFill(kept={})
    own = partial(programs.collective, place.machine, place.units, operation, n, None)
    entries = [
        Contender(NCCL, partial(_library_collective, place, operation, n, fill)),
        *_symmetric(place, operation, n),
        Contender(OURS, partial(_run, place, own, fill)),
    ]
    share = {"allreduce": 2.0, "broadcast": place.units / (place.units - 1)}.get(operation, 1.0)
    sent = share * (place.units - 1) / place.units * 2 * n
    calls = 8 if nbytes <= 4 * MIB else 2
    return Heat(operation, (n,), TYPE, place.units, "graph", NCCL, entries, bytes=sent, calls=calls)


def _library_collective(place: TimeSource, operation: str, n: int, fill: InputFill) -> Runner:
    if not place.simulated:
        return libraries.library_collective(operation, n)
    return _run(place, partial(programs.collective, place.machine, place.units, operation, n, NCCL), fill)


def _symmetric(place: TimeSource, operation: str, n: int) -> list[Contender]:
    """PyTorch's kernels; they sum, and their vectors are of 16 bytes."""
    if place.simulated or operation != OPERATIONS[0] or n % (8 * place.units):
        return []
    shots = ("one", "two") if 2 * n <= 16 * MIB else ("two",)
    return [Contender(f"{SYMMETRIC} {s}-shot", partial(libraries.symmetric_all_reduce, n, s)) for s in shots]


def _run(place: TimeSource, program: Callable[[], Any], fill: InputFill | None = None) -> Runner:
    return place.runner(program(), fill)


# -- operators ---------------------------------------------------------------------------------------------------------

OPERATORS = {
    "ag_gemm": ("all_gather", NARROW, WIDE, programs.gather_and_gemm),
    "gemm_rs": ("reduce_scatter", WIDE, NARROW, programs.gemm_and_scatter),
    "gemm_ar": ("allreduce", WIDE, NARROW, programs.gemm_and_sum),
}
"""Name -> its collective, N and K of each unit, and the program in phases."""


def operators(place: TimeSource, quick: bool) -> Iterator[Heat]:
    """GEMMs with a gather before them, or a scatter or a sum after them."""
    for rows in ROWS[2:3] if quick else ROWS:
        for name in OPERATORS:
            yield _operator(place, name, rows)


def _operator(place: TimeSource, name: str, rows: int) -> Heat:
    operation, n, k, phases = OPERATORS[name]
    shape = rows, n, k
    mode = "graph" if rows <= GRAPHED else "eager"
    if place.simulated:
        program = partial(phases, place.machine, place.units, shape)
        alone = partial(programs.product, place.machine, place.units, shape)
        entries = [
            Contender(ALONE, lambda: _run(place, alone)),
            Contender(f"{NCCL}, in order", lambda: _in_order(place, operation, shape)),
            Contender(OURS, lambda: _run(place, lambda: _overlapped(place, program()))),
        ]
    else:
        entries = [
            Contender(ALONE, partial(libraries.library_gemm, shape)),
            Contender(f"{NCCL}, in order", partial(libraries.library_operator, name, shape, place.units)),
            Contender(OURS, partial(libraries.own_operator, name, shape, place.units)),
        ]
        if mode == "eager" and rows <= FUSED_ROWS and name in libraries.FUSED:
            entries.append(Contender(SYMMETRIC, partial(libraries.fused_operator, name, shape, place.units)))
    return Heat(name, shape, TYPE, place.units, mode, ALONE, entries, 2 * rows * n * k)


def _overlapped(place: TimeSource, program: Any) -> Any:
    return compile_program(program, machine=place.machine, schedule="overlap").prim_func


def _in_order(place: TimeSource, operation: str, shape: tuple[int, int, int]) -> Runner:
    rows, n, k = shape
    moved = rows * (k if operation == OPERATIONS[1] else n)
    parts = (
        programs.product(place.machine, place.units, shape),
        programs.collective(place.machine, place.units, operation, moved, NCCL),
    )
    times = [place.runner(part).call() for part in parts]
    return Runner(lambda: sum(times))


WORKS: dict[str, Callable[[TimeSource, bool], Iterator[Heat]]] = {"collectives": collectives, "operators": operators}
"""Benchmarks by name."""
