# SPDX-License-Identifier: MIT
"""A kernel of one thread that meets its counterparts on all devices: between phases, at entry and at exit."""

from __future__ import annotations

from functools import cache
from typing import Any

from tilelang_core import stock as T
from tilescale.backends.cuda.lower import prelude


@cache
def barrier_function(devices: int, stride: int) -> Any:
    """A traced function `(rank_slot, limit, site, counters of all devices, epochs, wait record)`."""

    @T.prim_func
    def device_barrier(
        own: T.int32,
        limit: T.int64,
        site: T.int32,
        counters: T.StridedTensor((devices, 1), (stride // 4, 1), T.int32),
        epochs: T.Tensor((1,), T.int32),
        record: T.Tensor((8,), T.int64),
    ):
        with T.Kernel(1, threads=1, prelude=prelude()):
            T.call_extern("handle", "tilescale::drain")
            T.call_extern(
                "handle",
                "tilescale::barrier",
                T.address_of(counters[0, 0]),
                T.int64(stride // 4),
                own,
                devices,
                T.int64(0),
                T.address_of(epochs[0]),
                limit,
                T.address_of(record[0]),
                site,
            )

    return device_barrier.with_attr("tl.non_restrict_params", [b.data for b in device_barrier.buffer_map.values()])
