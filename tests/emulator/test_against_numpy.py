# SPDX-License-Identifier: MIT
"""Random programs of copies, collectives and tiles leave what NumPy computes from the same statements.

`make test-nightly` draws more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.program import Fuzzed, Line, Parameter

EXAMPLES = int(os.environ.get("RANDOM_PROGRAMS", "40"))

ROWS, COLUMNS = 2, 8
"""Shape of a part; the tensors X and Y have one for each device, P is one."""

EXACT = {"int32": 1 << 30, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}
"""Whole numbers up to which sums in a type have one result."""

REDUCED: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}

State = dict[str, np.ndarray]
"""Contents of the tensors of all devices, device by device."""


@dataclass(frozen=True)
class Step:
    """A statement of the program, and what it does to the tensors."""

    lines: tuple[Line, ...]
    does: Callable[[State], None]


def on_devices(*texts: str) -> tuple[Line, ...]:
    return (Line('with T.Scale("device") as (rank, _):', [Line(text) for text in texts]),)


@st.composite
def collectives(draw: st.DrawFn, devices: int, sums: bool) -> Step:
    """A collective of tensors. Sums only where no result can be inexact."""
    whole, other = draw(st.permutations(["X", "Y"]))
    op = draw(st.sampled_from(["sum", "max", "min"] if sums else ["max", "min"]))
    root = draw(st.integers(0, devices - 1))

    def allreduce(state: State) -> None:
        state[whole][:] = REDUCED[op](state[whole], axis=0)

    def reduce_scatter(state: State) -> None:
        state["P"][:] = REDUCED[op](state[whole], axis=0).reshape(devices, ROWS, COLUMNS)

    def all_gather(state: State) -> None:
        state[whole][:] = state["P"].reshape(devices * ROWS, COLUMNS)

    def all_to_all(state: State) -> None:
        parts = state[whole].reshape(devices, devices, ROWS, COLUMNS)
        state[other][:] = parts.swapaxes(0, 1).reshape(state[other].shape)

    def broadcast(state: State) -> None:
        state[whole][:] = state[whole][root]

    text, does = draw(
        st.sampled_from([
            (f'T.allreduce({whole}, op="{op}")', allreduce),
            (f'T.reduce_scatter({whole}, P, op="{op}")', reduce_scatter),
            (f"T.all_gather(P, {whole})", all_gather),
            (f"T.all_to_all({whole}, {other})", all_to_all),
            (f"T.broadcast({whole}, root={root})", broadcast),
        ])
    )  # fmt: skip
    return Step(on_devices(text), does)


@st.composite
def copies(draw: st.DrawFn, devices: int) -> Step:
    """Copy rows of a tensor to those of another one, of this device or of one at a distance."""
    source, target = draw(st.permutations(["X", "Y"]))
    count = draw(st.integers(1, devices * ROWS))
    first, to = (draw(st.integers(0, devices * ROWS - count)) for _ in range(2))
    shift = draw(st.integers(0, devices - 1))
    way = draw(st.sampled_from(["dst", "src"]))
    rows = f"{source}[{first}:{first + count}, 0:{COLUMNS}], {target}[{to}:{to + count}, 0:{COLUMNS}]"
    peer = f"{way}=(rank + {shift}) % {devices}"

    def does(state: State) -> None:
        moved = np.roll(state[source][:, first : first + count], shift if way == "dst" else -shift, axis=0)
        state[target][:, to : to + count] = moved

    return Step(on_devices("T.barrier()", f"T.copy({rows}, {peer})", "T.barrier()"), does)


@st.composite
def tiles(draw: st.DrawFn, devices: int, dtype: str) -> Step:
    """Each block takes a tile, changes its sign or not, and puts it elsewhere, at a peer or not."""
    source, target = draw(st.permutations(["X", "Y"]))
    sign, shift, turn = draw(st.sampled_from([1, -1])), draw(st.integers(0, devices - 1)), draw(st.booleans())
    level = draw(st.sampled_from(["l0", "l1"]))
    row = f"(b + {int(turn)}) % {devices} * {ROWS}"
    block = [
        Line(f'tile = T.alloc(({ROWS}, {COLUMNS}), "{dtype}", level="{level}")'),
        Line(f"T.copy({source}[b * {ROWS}, 0], tile)"),
        Line(f"for i, j in T.Parallel({ROWS}, {COLUMNS}):", [Line(f"tile[i, j] = tile[i, j] * {sign}")]),
    ]
    put = f"T.copy(tile, {target}[{row}, 0], dst=(rank + {shift}) % {devices})"
    block.append(Line('with T.Scale("device") as (rank, _):', [Line(put)]))

    def does(state: State) -> None:
        parts = state[source].reshape(devices, devices, ROWS, COLUMNS) * sign
        state[target][:] = np.roll(np.roll(parts, int(turn), axis=1), shift, axis=0).reshape(state[target].shape)

    barrier = on_devices("T.barrier()")
    return Step((*barrier, Line('with T.Scale("block"):', block), *barrier), does)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Fuzzed, list[Step]]:
    """A program of one to five devices, and its statements."""
    devices, dtype = draw(st.integers(1, 5)), draw(st.sampled_from(sorted(EXACT)))
    shape = devices * ROWS, COLUMNS
    parameters = [Parameter(name, shape, dtype, is_input=True) for name in "XY"]
    parameters.append(Parameter("P", (ROWS, COLUMNS), dtype, is_input=True))
    steps, largest = [], 32
    for _ in range(draw(st.integers(1, 8))):
        sums = largest * devices <= EXACT[dtype]
        step = draw(st.one_of(collectives(devices, sums), copies(devices), tiles(devices, dtype)))
        largest *= devices if "sum" in str(step.lines) else 1
        steps.append(step)
    body = [line for step in steps for line in step.lines]
    launch = Line(f"with T.Kernel(device={devices}, block={devices}, threads=32) as b:", body)
    return Fuzzed(draw(st.integers(0, 9)), devices, tuple(parameters), (launch,)), steps


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(programs(), st.sampled_from([None, 0, 1]))
def test_the_emulator_leaves_what_numpy_computes(made: tuple[Fuzzed, list[Step]], seed: int | None):
    program, steps = made
    given = program.arguments()
    names = [parameter.name for parameter in program.parameters]
    state = {name: np.stack([mine[i].double().numpy() for mine in given]) for i, name in enumerate(names)}
    for step in steps:
        step.does(state)
    left = program.emulated(schedule_seed=seed)
    for i, name in enumerate(names):
        found = np.stack([mine[i].double().numpy() for mine in left])
        np.testing.assert_array_equal(found, state[name], err_msg=f"{name} after\n{program.source}")
