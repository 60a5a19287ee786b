# SPDX-License-Identifier: MIT
"""A picture of collectives over the size of their tensors: a line for each system, and the bound by link bandwidth.

python benchmarks/curves.py collectives --mode graph --to collectives.png
"""

from __future__ import annotations

from chart import command

from tilescale.tuning.curves import PEAK, draw

if __name__ == "__main__":
    command(draw, __doc__, always=PEAK)()
