# SPDX-License-Identifier: MIT
"""Parts of a hierarchical tile program: our operations, layouts, and the structure above the grid's TIR.

    ops.py           the operations and markers, declared
    operations.py    typed views of calls of them
    norm.py          norm and quantization of an all-reduce's rows
    wire.py          floats that are sent in a narrower type
    asynchronous.py  those of a unit's copy queue, and the layout of a collective's parts
    layout.py        layouts of tiles over units
    shares.py        how the programs of a cluster split the operands of a GEMM
    persistent_loops.py  what overlaps with the next tile of a persistent loop
    builder.py       programs by the function that builds them
    model.py         launches, phases, parameters
    mesh.py          numbers, ranks and siblings of units of several levels
    effects.py       reads, writes, signals and waits of each statement, and its completion
    tile_boxes.py    which elements of tensors each program of a grid touches
    regions.py       whether two accesses may touch the same element
    parallel_loops.py  which threads execute the iterations of parallel loops
    fragments.py     which threads hold the elements of tiles in registers, and execute the statements on them
    dependence.py    order by waits, publication by signals, legal exchanges, liveness
    rendezvous_need.py    whether devices must synchronize when a call begins or ends
    arrivals.py      the signals that flags get during a call, and whether all are waited for
    footprint.py     shared memory and registers of a program, and programs of a device
    waiting.py       whether programs of a grid wait for one another
    grids.py         values of expressions in all programs of a grid
    extents.py       symbolic extents, and those in which ranks may differ
    pointers.py      tensors that are made of addresses
    source.py        programs as source text of the language
    expressions.py   expressions and tile arguments as such text
    preformatted.py  text with columns as HTML
    arguments.py     argument checks of all back ends
    no_source.py     functions whose source cannot be read
"""

from tilescale.program import no_source as no_source
