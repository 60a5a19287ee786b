# SPDX-License-Identifier: MIT
"""How many rows travel together: the machine's numbers, and the tiles that wait for them.

A chunk costs one start-up and one latency of what moves it (the postal model, Bar-Noy and Kipnis, 1994). Small chunks
let tiles begin early, large ones hide that price: the smallest chunk is taken whose price is `PRICE` of its transfer.
"""

from __future__ import annotations

import math

from tilescale.hda import Machine, Mechanism, Network
from tilescale.passes.overlap.schedule import Declined

PRICE = 0.125
"""Share of a chunk's transfer that starting it may take."""


def queue_of(network: Network | None, machine: Machine) -> Mechanism:
    """What moves data over a network while programs run.

    Raises:
        Declined: nothing does.
    """
    able = [m for m in network.mechanisms if m.started_by == "host" and m.put] if network is not None else []
    if not able:
        name = network.name if network is not None else machine.name
        raise Declined(f"nothing of {name} moves data while programs run")
    return able[0]


def chunk_rows(network: Network, mechanism: Mechanism, height: int, row_bytes: int, step: int) -> int:
    """Rows of a chunk: whole steps of tiles, and even parts of the rows where that is possible.

    Args:
        height: rows of one unit's part.
        row_bytes: bytes of a row.
        step: rows of a tile; 1 if tiles do not begin at multiples of one number.
    """
    rate = mechanism.put or network.bandwidth
    wanted = rate * mechanism.startup / PRICE / row_bytes
    steps = max(1, math.ceil(wanted / step))
    if steps * step >= height:
        return height
    whole = math.ceil(height / step)
    even = [n for n in range(steps, min(2 * steps, whole) + 1) if whole % n == 0]
    return (even or [steps])[0] * step
