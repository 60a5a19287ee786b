# SPDX-License-Identifier: MIT
"""Fusion of a program's grids and collectives into one launch of persistent blocks: `schedule="persistent"`.

    rewrite.py      the rewrite
    unroll.py       loops around phases as their iterations
    phases.py       the grids of a program that become tasks, or why they cannot
    collectives.py  collectives of whole tensors as grids of tiles
    dependences.py  which tasks wait for which of earlier phases
    counters.py     arrivals of the tasks of a phase, counted in device memory
    streams.py      tiles of weights loaded ahead, across tasks
    placement.py    which block executes which task
    task_body.py    the statements of a task
    tasks.py        the schedule in words
"""
