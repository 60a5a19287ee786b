# SPDX-License-Identifier: MIT
"""Units that execute: coroutines, what they wait for, and what the machine holds at once.

    units.py frame.py memory.py     the tree of units; the state in which one runs; memory that it has
    tasks.py scheduler.py interleave.py     coroutines, who runs, and other orders
    barriers.py rendezvous.py queues.py     barriers inside programs and clusters, of whole levels; copy queues
    grid.py programs.py     grids, and their programs
    emulation.py observe.py     what units ask of the emulation, and what it tells those who watch it
"""
