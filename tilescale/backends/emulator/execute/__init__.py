# SPDX-License-Identifier: MIT
"""Units that execute: coroutines, what they wait for, and what the machine holds at once.

    units.py frame.py       the tree of units; the state in which one runs
    scheduler.py interleave.py      coroutines, and other orders of them
    barriers.py rendezvous.py queues.py     barriers inside programs and clusters, of whole levels; copy queues
    grid.py         launches, phases, and programs as they become resident
    observe.py      what an emulation tells those who watch it
"""
