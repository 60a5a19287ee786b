# SPDX-License-Identifier: MIT
"""What a hierarchical tile program is made of: our operations, layouts, and the structure above the grid's TIR.

    ops.py           the operations and markers, declared
    operations.py    typed views of calls of them
    asynchronous.py  which of them a unit's copy queue executes, and how the parts of a gather lie
    layout.py        how tiles lie over units
    model.py         launches, phases, parameters
    effects.py       what each statement reads, writes, signals and waits for
    extents.py       symbolic extents
"""
