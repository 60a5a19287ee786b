# SPDX-License-Identifier: MIT
"""Operators of several ranks are what they are registered as: shapes of fake tensors depend on the ranks."""

import sys
from pathlib import Path

import torch

import tilescale

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.ops.test_operator_contracts import CASES, UNCOMPILED, VIEWS, check

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size

CASES |= {
    "scatter": lambda new, rows: [new(rows, SIZE), 0, 1, ""],
    "batch_send_recv": lambda new, rows: [
        [new(rows, 3)], [(RANK + 1) % SIZE], [new(rows, 3)], [(RANK - 1) % SIZE], ""
    ],
    "all_to_all_v": lambda new, rows: [new(rows, 3), [rows // SIZE] * SIZE, [rows // SIZE] * SIZE, ""],
    "all_gather_columns_matmul": lambda new, rows: [new(rows, 16), new(16 * SIZE, 8), new(1, 8)[0], ""],
}  # fmt: skip
"""Those whose arguments depend on the ranks."""

if __name__ == "__main__":
    for name in CASES:
        for view in VIEWS:
            torch.manual_seed(0)
            check((*UNCOMPILED, "test_aot_dispatch_dynamic"), name, view, (SIZE, torch.bfloat16))
        if RANK == 0:
            print("passed", name, flush=True)
