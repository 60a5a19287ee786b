# SPDX-License-Identifier: MIT
"""The collectives of NCCL: their rounds are a model, as NCCL chooses its algorithms itself.

A ring for each port (its channels), all-to-alls pair by pair, a broadcast along a ring. It combines by CUDA's fmaxf and
fminf, which drop a NaN.
"""

from __future__ import annotations

from functools import partial

from tilescale.collectives.algorithms import rings
from tilescale.collectives.record import TENSORS, Algorithm

NUMBERS = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Types that NCCL supports; others are moved as bytes."""

ALGORITHMS = (
    Algorithm(
        name="nccl",
        title="NCCL, modelled as a ring for each port.",
        schedules={
            **{operation: partial(rings.several, operation) for operation in rings.ROUNDS},
            "all_to_all": rings.pairwise,
            "all_to_all_v": rings.pairwise_v,
            "broadcast": rings.pipeline,
        },
        segmented=frozenset({"broadcast"}),
        forms=(TENSORS,),
        dtypes=NUMBERS,
        moves_all=True,
        library="nccl",
        in_order=False,
        keeps_nan=False,
        takes_functions=False,
    ),
)
