# SPDX-License-Identifier: MIT
"""The device services of the manifest."""

from __future__ import annotations

from tilescale.backends.cuda.running import nccl, repeated, stream_order, toolchain
from tilescale.backends.cuda.running.recording import recorded_memory
from tilescale.backends.services import DeviceServices
from tilescale.backends.tilelang import nvshmem_link

SERVICES = DeviceServices(
    repeated=repeated.RecordedCalls,
    call_kernel=repeated.call_kernel,
    not_recorded=repeated.not_recorded,
    recorders=repeated.recorders,
    memory_replaced=recorded_memory.replaced,
    was_read=lambda device: stream_order.stream_order(device).extend(),
    group=nccl.group_of_all,
    abort=nccl.abort,
    runs_within=lambda wait, seconds: stream_order.IdleWait(wait).within(seconds),
    compiler=toolchain.nvcc,
    check_cache=toolchain.check_cache,
    library=nvshmem_link.folder,
)
