# SPDX-License-Identifier: MIT
"""What the simulation of the time is told.

    recorder.py     the trace of a run
    instrumentation.py      what adds recording to closures: loops.py has serial loops, flags.py changes of flags
    persistent.py   roles of persistent loops
    registry.py costs.py transfers.py       what operations demand of the machine; tally.py counts single statements
    equivalence.py memoization.py   programs that do the same in runs without data: one stands for all
"""
