# SPDX-License-Identifier: MIT
"""What the simulation of the time is told.

    recorder.py     the record of a run
    costs.py tally.py       what operations demand of the machine; statements on single elements, counted
    loops.py        serial loops as one step
    equivalence.py memoization.py   programs that do the same in runs without data: one stands for all
"""
