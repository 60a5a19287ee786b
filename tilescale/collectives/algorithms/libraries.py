# SPDX-License-Identifier: MIT
"""Libraries. Their rounds are what they are taken to do: which algorithm one chooses is its own affair. Both combine by
CUDA's fmaxf and fminf, which drop a NaN.

NCCL: a ring for each port (its channels), all-to-alls pair by pair, a broadcast along a ring. NVSHMEM: the direct
algorithms, by its own puts between memories of its heap.
"""

from __future__ import annotations

from functools import partial

from tilescale.collectives.algorithms import direct, rings
from tilescale.collectives.record import TENSORS, Algorithm

NUMBERS = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Types that both take; NCCL moves others as bytes."""

ALGORITHMS = (
    Algorithm(
        name="nccl",
        title="NCCL, taken to use a ring for each port.",
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
    Algorithm(
        name="nvshmem",
        title="NVSHMEM's own, taken to be direct; tensors lie in its heap.",
        schedules={
            "allreduce": direct.two_shot,
            "reduce_scatter": direct.reduce_scatter,
            "all_gather": direct.all_gather,
            "all_to_all": direct.all_to_all,
            "broadcast": direct.broadcast,
        },
        forms=(TENSORS,),
        dtypes=NUMBERS,
        reductions=("sum", "max", "min"),
        mechanism="nvshmem",
        in_order=False,
        keeps_nan=False,
        on_request=True,
        takes_functions=False,
    ),
)
