# SPDX-License-Identifier: MIT
"""Warp specialization of a grid phase: roles of threads, and the channels through which they hand tiles over.

graph.py           roles, channels, and their dump in a kernel's schedule
stage.py           the stage of roles: loops with a producer of stock TileLang
role_assignment.py the statements of such a producer: loads, and the waits before them
persistent_ws.py   warps that keep their roles in all iterations of a persistent loop
loads.py gates.py  a producer's loads, and the waits that order them
ring_loads.py      loads into rings that the program itself makes, by a warp of their own
mbarriers.py       waits and arrivals of rings of tiles
epilogue.py        the epilogue of a persistent loop: communication or store warps
split.py           the branch between producer and consumers
"""
