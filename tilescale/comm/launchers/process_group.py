# SPDX-License-Identifier: MIT
"""Programs that start their own ranks, as serving engines do, and have joined them by torch.distributed already."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any

from tilescale.comm.launchers.base import Joined
from tilescale.comm.trust.key import JobKey


class ProcessGroup:
    """The ranks of torch.distributed's default group, which share its store."""

    def started_this(self, env: Mapping[str, str]) -> bool:
        """Whether the group exists; `env` does not show it."""
        distributed = _distributed()
        return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1

    def join(self, env: Mapping[str, str], timeout_s: float) -> Joined:
        """Learn the hosts of all ranks from the store. Raises LaunchError where a job on several hosts has no key."""
        from torch.distributed import PrefixStore

        distributed = _distributed()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = PrefixStore("tilescale", distributed.distributed_c10d._get_default_store())
        node = socket.gethostname()
        store.set(f"host of {rank}", node)
        hosts = [store.get(f"host of {other}").decode() for other in range(size)]
        one_host = len(set(hosts)) == 1
        return Joined(
            "torch.distributed",
            rank,
            size,
            node=node,
            host="127.0.0.1" if one_host else hosts[0],
            store=store,
            key=JobKey.from_env(env) if one_host else JobKey.of_hosts(env),
        )


def _distributed() -> Any:
    """torch.distributed, if it is loaded: this package does not load it."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() else None
