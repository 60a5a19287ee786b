# SPDX-License-Identifier: MIT
"""Collectives as schedules of transfers, and what they take on a described machine.

    schedule.py      rounds of messages between numbered units
    rings.py         neighbour to neighbour: one ring, several, a pipeline
    doubling.py      partners at distances 1, 2, 4, ...
    trees.py         a binomial tree, two pipelined binary trees
    direct.py        everybody to everybody at once
    hierarchical.py  inside groups first, then across them
    table.py         all of them by operation and name
    routes.py        routes between many units at once, as arrays
    estimate.py      seconds of a schedule on a machine, with shared links

    from tilescale.timing.collectives import estimate
    estimate(machine, "device", "allreduce", "ring", 1 << 30).seconds
"""

from tilescale.timing.collectives.estimate import Estimate, estimate
from tilescale.timing.collectives.schedule import Round, Schedule
from tilescale.timing.collectives.table import ALGORITHMS, PIPELINED, names, schedule

__all__ = ["ALGORITHMS", "PIPELINED", "Estimate", "Round", "Schedule", "estimate", "names", "schedule"]
