# SPDX-License-Identifier: MIT
"""Random chains of collectives with grids between them leave the same bits when all overlap that may.

`make test-nightly` draws more of them.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.program import Fuzzed, Line, Parameter
from tests.overlap.support import check_same, overlapped
from tilescale.errors import UsageError

EXAMPLES = int(os.environ.get("RANDOM_PROGRAMS", "12"))

ROWS, COLUMNS = 8, 16
"""Of a device's part."""


def grid(source: str, target: str, rows: int, tile: int, factor: int) -> Line:
    """Each block takes a tile, multiplies it, and keeps it elsewhere."""
    body = [
        f'x = T.alloc(({tile}, {COLUMNS}), "float32", level="l1")',
        f"if b < {rows // tile}:",
        f"T.copy({source}[b * {tile}, 0], x)",
        f"for i, j in T.Parallel({tile}, {COLUMNS}):",
        f"x[i, j] = x[i, j] * {factor}",
        f"T.copy(x, {target}[b * {tile}, 0])",
    ]
    alloc, condition, load, loop, multiply, store = map(Line, body)
    loop.body.append(multiply)
    condition.body += [load, loop, store]
    return Line('with T.Scale("device"), T.Scale("block"):', [alloc, condition])


@st.composite
def chains(draw: st.DrawFn) -> Fuzzed:
    """A part is gathered, a whole is added up, scattered or exchanged; grids are between, or are not."""
    devices, tile = draw(st.integers(2, 4)), draw(st.sampled_from([4, 8]))
    whole, allocated, body = ROWS * devices, [], []
    here, rows, taken = "X", ROWS, ["grid"]

    def new(rows: int) -> str:
        name = f"t{len(allocated)}"
        allocated.append(Line(f'{name} = T.alloc(({rows}, {COLUMNS}), "float32", level="l2")'))
        return name

    for _ in range(draw(st.integers(2, 4))):
        kinds = ["all_gather"] if rows == ROWS else ["reduce_scatter", "allreduce", "all_to_all"]
        taken.append(draw(st.sampled_from(kinds)))
        if taken[-1] == "allreduce":
            if here == "X":
                continue
            text = f"T.allreduce({here})"
        else:
            rows = {"all_gather": whole, "reduce_scatter": ROWS, "all_to_all": whole}[taken[-1]]
            source, here = here, new(rows)
            text = f"T.{taken[-1]}({source}, {here})"
        body.append(Line('with T.Scale("device"):', [Line(text)]))
        if draw(st.booleans()):
            source, here = here, new(rows)
            body.append(grid(source, here, rows, tile, draw(st.integers(-2, 2))))
    body.append(grid(here, "Y", rows, tile, 1))
    launch = Line(f"with T.Kernel(device={devices}, block={whole // tile}, threads=32) as b:", [*allocated, *body])
    parameters = [Parameter("X", (ROWS, COLUMNS), "float32", is_input=True), Parameter("Y", (rows, COLUMNS), "float32")]
    return Fuzzed(draw(st.integers(0, 9)), devices, tuple(parameters), (launch,))


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(chains(), st.sampled_from([None, 4, 8, 16]), st.booleans(), st.sampled_from([None, 1, 2]))
def test_chains_leave_the_same_bits_when_they_overlap(chain: Fuzzed, chunk: int | None, ordered: bool, seed: Any):
    func = chain.trace()
    try:
        changed, _ = overlapped(func, chunk=chunk, ordered=ordered)
    except UsageError as error:
        assert "chunk" in error.message, error
        return
    check_same(func, changed, chain.arguments(), seeds=(seed, 7))
