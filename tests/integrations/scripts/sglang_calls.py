# SPDX-License-Identifier: MIT
"""SGLang's plugin loader and hooks, and the out-of-place all-reduce of its groups, with TileScale's communicator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from needs import SLOTS, load_plugins, needed
from ranks import check_signatures, check_uses, close, members

state = needed("sglang.srt.distributed.parallel_state")
custom = needed(SLOTS["sglang"])
load_plugins("sglang")

from tilescale.ops import symm_mem  # noqa: E402 - as the plugin has left them
from tilescale.ops.engine_plugins import SglangCommunicator  # noqa: E402

group, x, total = members()
assert symm_mem._library is not None
kind = custom.dispatch_custom_allreduce(group=group, device=x.device)
assert kind is SglangCommunicator, kind
shared = check_signatures(kind, custom.CustomAllreduce)
assert {"__init__", "capture", "should_custom_ar", "custom_all_reduce", "close"} <= shared, shared
comm = kind(group=group, device=x.device)
asked = check_uses(comm, Path(state.__file__))
assert {"disabled", "capture", "custom_all_reduce"} <= asked, asked

others = dict.fromkeys(("qr_comm", "pymscclpp_comm", "torch_symm_mem_comm", "pynccl_comm", "pcie_ipc_comm"))
of_group = SimpleNamespace(ca_comm=comm, **others)
calls = state.GroupCoordinator
assert calls._resolve_outplace_all_reduce_method(of_group, x) == "ca"
close(calls._all_reduce_out_place(of_group, x, "ca"), total)
print("passed", flush=True)
