# SPDX-License-Identifier: MIT
"""The algorithms: every file here has the records of a family in `ALGORITHMS`.

direct.py         every unit to every unit at once: one_shot, two_shot, direct
copies.py         the same by the devices' copy engines
rings.py          neighbour to neighbour: one ring, several, a pipeline
doubling.py       partners at distances 1, 2, 4, ...
trees.py          a binomial tree, two pipelined binary trees
hierarchical.py   inside groups first, then across them
libraries.py      NCCL, NVSHMEM
"""
