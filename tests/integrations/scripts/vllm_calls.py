# SPDX-License-Identifier: MIT
"""vLLM's plugin loader, and collectives of its CUDA communicator, with TileScale in its custom all-reduce's place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from needs import SLOTS, load_plugins, needed
from ranks import check_signatures, check_uses, close, members

communicators = needed("vllm.distributed.device_communicators.cuda_communicator")
custom = needed(SLOTS["vllm"])
theirs = custom.CustomAllreduce
load_plugins("vllm")

from tilescale.ops import symm_mem  # noqa: E402 - as the plugin has left them
from tilescale.ops.engine_plugins import VllmCommunicator  # noqa: E402

assert symm_mem._library is not None and custom.CustomAllreduce is VllmCommunicator
shared = check_signatures(VllmCommunicator, theirs)
assert {"__init__", "capture", "should_custom_ar", "all_reduce", "custom_all_reduce", "close"} <= shared, shared

group, x, total = members()
comm = custom.CustomAllreduce(group=group, device=x.device, symm_mem_enabled=False, register_graph_buffers=True)
assert not comm.disabled
folder = Path(custom.__file__).parents[2]
of_amd = {"allreduce_rms_fusion.py"}  # calls AITER's class by the same name
asked = check_uses(comm, *[path for path in folder.rglob("*.py") if path.name not in of_amd])
assert {"disabled", "should_custom_ar", "capture", "custom_all_gather", "fully_connected"} <= asked, asked

others = dict.fromkeys(
    ("fi_ar_comm", "pynccl_comm", "qr_comm", "fi_pcie_ipc_ar_comm", "aiter_ar_comm", "symm_mem_comm")
)
calls = communicators.CudaCommunicator
of_group = SimpleNamespace(ca_comm=comm, use_aiter_allreduce=False, device_group=group, **others)
close(calls.all_reduce(of_group, x), total)
close(calls.custom_reduce_scatter(of_group, x), total.chunk(2)[group.rank()])
assert calls.custom_all_gather(of_group, x).shape == (12, 64)
with comm.capture():
    close(calls.all_reduce(of_group, x), total)
print("passed", flush=True)
