# SPDX-License-Identifier: MIT
"""Programs of a cluster, through each other's shared memory.

stage.py unit.py             the stage, its rules for tile operations, and a cluster that executes as one unit
sharding.py regions.py       how a cluster's tiles are split over its programs, and what statements name of them
collectives.py               rules: barriers and collectives between the programs
dsmem.py                     barriers of the cluster, moves, and elements of peers' tiles
loads.py ring.py             operands that all need: bulk copies to the whole cluster in a ring of stages
pair.py                      products of two programs as one, where the tensor cores do that
"""
