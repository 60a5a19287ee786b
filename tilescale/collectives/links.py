# SPDX-License-Identifier: MIT
"""Links of a machine as shared resources, and the demands of a collective on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilescale.hda.route import Endpoint, Hop


class SharedLink(NamedTuple):
    """One directed link of a network: transfers that cross it share it."""

    network: str
    source: Endpoint
    target: Endpoint

    @staticmethod
    def of(hop: Hop) -> SharedLink:
        """The link of a hop of a route."""
        return SharedLink(hop.network, hop.source, hop.target)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.network})"


@dataclass(frozen=True)
class CollectivePlan:
    """Load of a collective on an otherwise idle machine.

    Attributes:
        algorithm: which was taken, e.g. "ring".
        seconds: from the last unit's arrival until all have the result.
        nbytes: that the busiest unit sends.
        links: for each link that it crosses, the seconds for which its bytes occupy the whole link. A transfer by a
            mechanism that reaches 80 % of a link occupies it for as long as its bytes take at 80 %.
    """

    algorithm: str
    seconds: float
    nbytes: int
    links: Mapping[SharedLink, float]
