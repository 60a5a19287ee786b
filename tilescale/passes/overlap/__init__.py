# SPDX-License-Identifier: MIT
"""Overlap of collectives with the grids around them, as a rewrite from programs to programs of the same language:

    rewrite.py              one collective after the other: rewrites, exceptions, and reasons
    schedule.py             the decision for each, as an object that can be edited and passed back
    candidates.py           schedules that are worth measuring
    legality.py             conditions under which a collective may be split
    partition.py            the rows of a tensor, which its parts consist of
    part_tiles.py           tiles of grids whose axes number the parts and the tiles of a part
    access_maps.py          accesses of a grid to a tensor, and the rows that each program touches
    chunks.py               rows that are sent together, and their flags
    tile_order.py           the order of a grid's tiles
    gather.py               all_gather -> grid
    local_rows.py           all_gather -> grid: local rows where they are
    slices.py               all_gather -> grid: slices of columns, for loops over these
    raster.py               tiles of programs: in groups of rows, and of a persistent grid
    prefetch.py             all_gather in a layer loop -> grid: one layer ahead
    scatter.py              grid -> reduce_scatter, grid -> allreduce
    tile_collective.py      grid -> allreduce: tile by tile, in the grid
    exchange.py             grid -> all_to_all -> grid
    shift.py                grid, and copies to a peer: loops that go round a ring
    rotation.py             loops that begin with such copies
    loop_context.py         the position of a device phase among loops and grids
    producers_consumers.py  the producer and consumer grids of a collective
    arrival_reduce.py       the grid that adds up arrived parts
    epilogue.py             local rows that are added up in their tiles' epilogues
    accumulators.py         local rows whose accumulators they are added to
    estimate.py             times in program order and overlapped, and the rows of a chunk
    tile_cost.py            times of a grid's tiles
    rewriter.py             changes of a traced function
"""
