# SPDX-License-Identifier: MIT
"""Text for AMD GPUs through stock TileLang: generated, not run.

`headers`: device functions in HIP. `../tilelang` turns programs into TileLang functions.
"""

from __future__ import annotations

from tilescale.backends.base import Backend
from tilescale.backends.hip.support import collectives, lower, target_for

BACKEND = Backend(
    "hip",
    available=lambda: False,
    lower=lower,
    priority=5,
    generates=True,
    target=target_for,
    collectives=collectives,
)
