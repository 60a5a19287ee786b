# SPDX-License-Identifier: MIT
"""Execution of units: coroutines, waits, residency on the machine.

    units.py frame.py memory.py     the tree of units; the state of a coroutine; memory of units
    tasks.py scheduler.py interleave.py     coroutines, the scheduler, other interleavings
    barriers.py unit_rendezvous.py queues.py     barriers inside programs and clusters, of whole levels; copy queues
    grid.py programs.py     grids, and their programs; lockstep.py runs many programs as one
    emulation.py observe.py     the emulation's interface to units, and to observers
"""
