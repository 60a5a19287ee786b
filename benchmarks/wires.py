# SPDX-License-Identifier: MIT
"""Wires under load, on this computer's GPUs: one pair, each to the next one, each to all others, all others to one.

    torchrun --nproc-per-node 8 benchmarks/wires.py                       everything
    torchrun --nproc-per-node 8 benchmarks/wires.py --only "all to one"   one pattern

A shape is that of a message, 64 MiB. Rates are those of the busiest direction of a GPU's link.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import patterns  # noqa: E402 - found through the path above
from suite import Suite, command  # noqa: E402

if __name__ == "__main__":
    command(Suite(SCRIPT, patterns.heats), __doc__)()
