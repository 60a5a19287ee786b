# SPDX-License-Identifier: MIT
"""Who executes what of a grid phase: roles of threads, and the channels through which they hand tiles on.

graph.py                     roles, channels, and their dump in a kernel's schedule
stage.py                     the stage of roles: which loops have a producer of stock TileLang's
assignment.py                what such a producer executes: loads, and the waits before them
persistent.py                warps that keep their roles in all turns of a persistent loop
loads.py gates.py            what a producer loads, and the waits that order it
mbarriers.py                 waits and arrivals of rings of tiles
epilogue.py                  what ends iterations of a persistent loop: communication or store warps
split.py                     the branch between the role that loads and the role that computes
"""
