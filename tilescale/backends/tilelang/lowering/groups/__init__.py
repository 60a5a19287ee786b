# SPDX-License-Identifier: MIT
"""Thread groups: units inside a program (warpgroups, warps, threads) as exclusive branches of its threads.

stage.py                 the stage: runs of statements become branches, one for each unit
unit.py threads.py       units as ranges of threads, and thread-dependent names
distribution.py state.py distribution of a program's tiles over units, and the buffers of their parts
clones.py shares.py      one unit's clone of a region, and its share of a statement of the program
slots.py collectives.py  collectives of units, through shared memory
loops.py                 pipelined loops that can have a producer, and their parts
pipelines.py             lowering of these loops, and of the loads
tile_handoff.py          parts of tiles that a unit waits for and releases
results.py               sums of two units that are only stored
barriers.py ranges.py    once all is lowered: hardware barriers, and one range of threads for each fragment
registers.py             one array for sibling units' parts of a tile
"""
