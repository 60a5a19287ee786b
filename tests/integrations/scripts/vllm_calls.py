# SPDX-License-Identifier: MIT
"""vLLM's plugin loader, and collectives of its CUDA communicator, with TileScale in its custom all-reduce's place."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

from needs import close, entry_points, members, needed

plugins = needed("vllm.plugins")
communicators = needed("vllm.distributed.device_communicators.cuda_communicator")
custom = needed("vllm.distributed.device_communicators.custom_all_reduce")

group, x, total = members()
importlib.metadata.entry_points = entry_points
plugins.load_general_plugins()

from tilescale.ops import symm_mem  # noqa: E402 - as the plugin has left them
from tilescale.ops.communicator import Communicator  # noqa: E402

assert symm_mem._library is not None and issubclass(custom.CustomAllreduce, Communicator)
comm = custom.CustomAllreduce(group=group, device=x.device, symm_mem_enabled=False, register_graph_buffers=True)
assert not comm.disabled
others = dict.fromkeys(
    ("fi_ar_comm", "pynccl_comm", "qr_comm", "fi_pcie_ipc_ar_comm", "aiter_ar_comm", "symm_mem_comm")
)
theirs = communicators.CudaCommunicator
of_group = SimpleNamespace(ca_comm=comm, use_aiter_allreduce=False, device_group=group, **others)
close(theirs.all_reduce(of_group, x), total)
close(theirs.custom_reduce_scatter(of_group, x), total.chunk(2)[group.rank()])
assert theirs.custom_all_gather(of_group, x).shape == (12, 64)
with comm.capture():
    close(theirs.all_reduce(of_group, x), total)
print("passed", flush=True)
