# SPDX-License-Identifier: MIT
"""Machines as data: levels of units, memory layers and networks, and what programs ask of them.

from tilescale.hda import Machine
machine = Machine.load("h200-sxm-8")
machine.path("device", 0, 5).bandwidth
"""

from tilescale.hda.machine import Machine
from tilescale.hda.model import ComputeUnit, Level, Library, Link, Mechanism, MemoryLayer, Network
from tilescale.hda.route import Endpoint, Hop, Path

__all__ = [
    "ComputeUnit",
    "Endpoint",
    "Hop",
    "Level",
    "Library",
    "Link",
    "Machine",
    "Mechanism",
    "MemoryLayer",
    "Network",
    "Path",
]
