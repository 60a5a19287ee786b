# SPDX-License-Identifier: MIT
"""Who executes what of a grid phase: roles of threads, and the channels through which they hand tiles on.

graph.py                     roles, channels, and their dump in a kernel's schedule
loads.py gates.py            what a producer loads, and the waits that order it
mbarriers.py                 waits and arrivals of rings of tiles
epilogue.py                  what ends iterations of a persistent loop: communication or store warps
split.py                     the branch between the role that loads and the role that computes
"""
