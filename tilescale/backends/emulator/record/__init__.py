# SPDX-License-Identifier: MIT
"""The record of a run, which the simulation of time replays.

    recorder.py     the trace of a run
    instrumentation.py      adds recording to closures, of flags and roles too; loops.py has serial loops
    registry.py costs.py transfers.py       costs of operations; tally.py counts single statements
    equivalence.py  programs with equal steps in runs without data: one is run for all
"""
