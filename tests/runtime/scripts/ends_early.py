# SPDX-License-Identifier: MIT
"""Rank 1 ends, in one of several forms, before the kernel call in which the others wait."""

from __future__ import annotations

import os
import signal
import sys

import torch

import tilescale
from tests.runtime import programs

world = tilescale.init()
kernel = tilescale.compile(programs.total(world.size))
world.barrier()  # all have compiled it: the others come to the call soon
if world.rank == 1:
    if sys.argv[1] == "exits":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
kernel(torch.zeros(64), torch.zeros(64))
print("reached the end", flush=True)
