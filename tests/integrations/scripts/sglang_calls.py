# SPDX-License-Identifier: MIT
"""SGLang's plugin loader and hooks, and the out-of-place all-reduce of its groups, with TileScale's communicator."""

from __future__ import annotations

import os
from types import SimpleNamespace

from needs import close, entry_points, members, needed

os.environ["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] = "0"  # the second version needs a GPU to be imported
plugins = needed("sglang.srt.plugins")
state = needed("sglang.srt.distributed.parallel_state")
custom = needed("sglang.srt.distributed.device_communicators.custom_all_reduce")

group, x, total = members()
plugins.entry_points = entry_points
custom._is_cuda = True  # what it asks before it chooses a class
plugins.load_plugins()

from tilescale.ops import symm_mem  # noqa: E402 - as the plugin has left them
from tilescale.ops.communicator import Communicator  # noqa: E402

assert symm_mem._library is not None
kind = custom.dispatch_custom_allreduce(group=group, device=x.device)
assert issubclass(kind, Communicator), kind
comm = kind(group=group, device=x.device)
others = dict.fromkeys(("qr_comm", "pymscclpp_comm", "torch_symm_mem_comm", "pynccl_comm", "pcie_ipc_comm"))
of_group = SimpleNamespace(ca_comm=comm, **others)
close(state.GroupCoordinator._all_reduce_out_place(of_group, x, "ca"), total)
print("passed", flush=True)
