# SPDX-License-Identifier: MIT
"""Thread groups: units inside a program (warpgroups, warps, threads) as exclusive branches of its threads.

stage.py                     the stage: runs of statements become branches, one for each unit
unit.py threads.py           units as ranges of threads, and which names tell threads apart
distribution.py state.py     how units hold tiles of the program, and the buffers that stand for what they hold
clones.py shares.py          one unit's text of a region, and its part of a statement of the program
slots.py collectives.py      what units do together, through shared memory
loops.py                     which pipelined loops can run beside threads that load ahead, and of what they consist
pipelines.py                 these loops, and the loads
handover.py                  which parts of tiles a unit waits for and gives back, and when
results.py                   sums of two units that are only stored
barriers.py ranges.py        once all is lowered: hardware barriers, and one range of threads for each fragment
registers.py                 one array for what sibling units hold of a tile
"""
