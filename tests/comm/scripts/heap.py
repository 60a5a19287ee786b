# SPDX-License-Identifier: MIT
"""Ranks that share a heap as processes: `share` uses it, `kill` loses a rank in between."""

import atexit
import os
import signal
import sys

import torch

from tilescale import comm

atexit.register(lambda: print("read at exit", int(x[0])))  # runs after the heap's own exit handler
world = comm.init()
x = comm.from_tensor(torch.full((1 << 20,), world.rank, dtype=torch.int32))
everywhere = comm.default_heap().peers(x)
assert [int(everywhere[p].sum()) >> 20 for p in range(world.size)] == list(range(world.size))
world.barrier()
everywhere[(world.rank + 1) % world.size, 7] = 100 + world.rank
world.barrier()
assert x[7] == 100 + (world.rank - 1) % world.size
if sys.argv[1] == "kill" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
big = comm.zeros(8 << 20, torch.float32)  # makes the heap grow
comm.default_heap().peers(big)[world.rank].fill_(1.0)
assert big.sum() == 8 << 20
print("heap works")  # the tensors are alive when the process ends
