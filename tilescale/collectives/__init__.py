# SPDX-License-Identifier: MIT
"""Collectives: every algorithm is one record, by which it is chosen, emulated, simulated and generated.

from tilescale.collectives import estimate
estimate(machine, "device", "allreduce", "ring", 1 << 30).seconds
"""

from tilescale.collectives.estimate import Estimate, estimate
from tilescale.collectives.record import FORMS, PROGRAMS, TENSORS, THREAD_GROUPS, TILES, Algorithm, form_of
from tilescale.collectives.round_schedule import Round, RoundSchedule
from tilescale.collectives.select import AvailableAlgorithms, CollectiveQuery, select
from tilescale.collectives.table import algorithm, names, records, schedule

__all__ = [
    "FORMS",
    "THREAD_GROUPS",
    "PROGRAMS",
    "TENSORS",
    "TILES",
    "Algorithm",
    "AvailableAlgorithms",
    "Estimate",
    "Round",
    "RoundSchedule",
    "CollectiveQuery",
    "algorithm",
    "estimate",
    "form_of",
    "names",
    "records",
    "schedule",
    "select",
]
