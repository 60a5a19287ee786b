# SPDX-License-Identifier: MIT
"""Units of a launch that the network of their level links; others are reached through coarser levels."""

from __future__ import annotations

import math
from functools import lru_cache

from tilescale.errors import NoPathError, PeerOutOfRangeError
from tilescale.hda import Machine
from tilescale.hda.model import Network
from tilescale.hda.route import Path
from tilescale.settings import settings

WHOLE_LINES = "whole-lines"
"""The capability of a network that delivers a warp's store of a line atomically, as LL128 requires."""

SHARE = 0.1
"""Share of a message's time that its start and latency may take: chunks are sized accordingly."""


@lru_cache(maxsize=256)
def linked(machine: Machine, sizes: tuple[tuple[str, int], ...]) -> int:
    """Number of consecutive units that own tensors and share one network: those of a node, where nodes have one.
    `sizes`: units of each launched level, coarsest first; they are numbered row-major."""
    level, used = machine.tensor_level.name, dict(sizes[1:])
    units, own = math.prod(n for _, n in sizes), [net.name for net in machine.networks if net.level == level]
    for peer in range(1, units):
        try:
            networks = machine.path(level, 0, peer, sizes=used).networks
        except (NoPathError, PeerOutOfRangeError):
            return peer
        if not {*networks} <= {*own}:
            return peer
    return units


def delivers_lines(network: Network | None) -> bool:
    """Whether a network delivers lines atomically; that is not known between ranks that share a GPU."""
    return network is not None and WHOLE_LINES in network.capabilities and not settings().share_gpus


def message_bytes(path: Path) -> int:
    """Bytes of a message of several that follow one another: whole MiB, of which latency is a small share."""
    startup = max((mechanism.startup for mechanism in path.mechanisms), default=0.0)
    wanted = path.bandwidth * (path.latency + startup) / SHARE
    return max(1, math.ceil(wanted / 2**20)) << 20
