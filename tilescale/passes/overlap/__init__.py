# SPDX-License-Identifier: MIT
"""Overlap of collectives with the grids around them, as a rewrite from programs to programs of the same language:

    rewrite.py    one collective after the other: what is rewritten, what stays, and why
    schedule.py   what was decided for each, as an object that can be edited and passed back
    candidates.py schedules that are worth measuring
    legality.py   what must hold before a collective may be taken apart
    rows.py       the rows of a tensor, which its parts consist of
    uses.py       where a grid uses a tensor, and which of its rows each program touches
    chunks.py     rows that travel together, and their flags
    order.py      the order of a grid's tiles
    gather.py     all_gather -> grid
    prefetch.py   all_gather in a layer loop -> grid: one layer ahead
    columns.py    all_gather along columns -> grid
    scatter.py    grid -> reduce_scatter, grid -> allreduce
    exchange.py   grid -> all_to_all -> grid
    shift.py      grid, and copies to a peer: loops that go round a ring
    rotation.py   loops that begin with such copies
    turns.py      the position of a device phase among loops and grids
    sides.py      the producer and consumer grids of a collective
    sums.py       the grid that adds up what has arrived
    epilogue.py   own rows that are added up by the tiles that make them
    estimate.py   what it takes in order and overlapped, and how many rows travel together
    work.py       what the tiles of a grid take
    edits.py      changes of a traced function
"""
