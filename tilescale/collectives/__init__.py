# SPDX-License-Identifier: MIT
"""Collectives: every algorithm is one record, by which it is chosen, emulated, simulated and generated.

record.py        record of an algorithm; kinds of collective
algorithms/      the algorithms, a family a file
table.py         all of them by operation and name
round_schedule.py  rounds of messages between numbered units
play.py          what rounds compute
routes.py        routes between many units at once, as arrays
links.py         links as shared resources, and the demands of a collective
estimate.py      seconds of a schedule on a machine, with shared links
request.py       the request that an algorithm is chosen for
select.py        the choice

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
