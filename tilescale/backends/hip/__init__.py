# SPDX-License-Identifier: MIT
"""Text for AMD GPUs through stock TileLang: generated, not run.

target.py   the compilation target of a machine
support.py  a lowered program: its HIP text

`headers`: device functions in HIP. `../tilelang` turns programs into TileLang functions.
"""

from __future__ import annotations

from tilescale.backends.base import Backend
from tilescale.backends.hip.support import collectives, lower, supports
from tilescale.backends.hip.target import target_for

BACKEND = Backend(
    "hip",
    available=lambda: False,
    lower=lower,
    priority=5,
    generates=True,
    supports=supports,
    target=target_for,
    collectives=collectives,
)
