# SPDX-License-Identifier: MIT
"""Programs of a cluster, through each other's shared memory.

dsmem.py                     moves, meetings and elements of peers' tiles
collectives.py               rules: copies, barriers and collectives between the programs
unit.py parts.py             a cluster that executes as one unit, and how its tiles are split over the programs
loads.py ring.py             operands that all need: bulk copies to the whole cluster in a ring of stages
roles.py                     warps that issue them, beside those that use them
pair.py                      products of two programs as one, where the tensor cores do that
"""
