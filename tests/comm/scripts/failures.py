# SPDX-License-Identifier: MIT
"""One rank fails, the others wait for it, or are busy: failures.py WHAT RANK"""

import os
import signal
import sys
import time

from tilescale.comm import Team, init

what, culprit = sys.argv[1], int(sys.argv[2])
if what == "early" and os.environ["RANK"] == str(culprit):
    raise ValueError("before init")


def dies_when_all_are_connected(team: Team, *_: object) -> None:
    server = team._session.server  # that of rank 0; another rank is connected before its session begins
    while server is not None and len(server.holding()) < team.size - 1:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if what == "kill in init" and os.environ["RANK"] == str(culprit):
    Team._all_gather = dies_when_all_are_connected
world = init()
print(f"rank {world.rank} is in", flush=True)
if world.rank == culprit:
    if what in ("raise", "raise while others work"):
        raise ValueError("deliberate")
    if what == "exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "mismatch":
        world.gather(1)
    if what == "late":
        time.sleep(300)
elif what == "raise while others work":
    time.sleep(300)
world.barrier()
