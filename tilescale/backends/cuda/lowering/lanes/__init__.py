# SPDX-License-Identifier: MIT
"""Units inside a program (warpgroups, warps, threads) as exclusive branches of its threads.

lanes.py                 runs of statements become branches; owns tiles and barriers
clones.py                one unit's text
holdings.py sharing.py   tiles that units hold copies or parts of, and a unit's part of a statement
meetings.py              what units do together, through shared memory
loops.py pipelines.py    pipelined loops beside threads that load ahead
handover.py              which parts of tiles a unit waits for and gives back, and when
results.py               sums of two units that are only stored
registers.py             one array for what sibling units hold of a tile
ranges.py                one range of threads for each fragment, enough hardware barriers
"""
