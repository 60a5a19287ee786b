# SPDX-License-Identifier: MIT
"""Lowering of programs to plain TileLang functions and host operations.

program.py                          a program for a target: its tree of parts, each lowered
plan.py device_phase_grids.py       device phases split into host operations and grids
host_step.py messages.py            host operations; copies and signals between devices that share no memory
reach.py internode.py               devices that share memory; transports of tensors and programs' operations to others
queued.py                           operations for a device's copy queue, and reasons against the rest
split_grid.py                       a grid for each branch of a grid that branches by program index
stages.py phase.py                  from a grid phase to a kernel: all stages in order, and the record between them
registry.py markers.py              rules of operations; marks of stages for later ones
statements.py                       predicates on statements
deferred_stores.py send_pipeline.py copies and signals completed one iteration later; blocks that only send
devices.py signature.py             the stage of devices, and the kernel's parameters
operands.py                         peers, values and flag indices that are read from memory
signals.py completion.py            rules: signals, waits and barriers, and completion of copies
peer_atomics.py broadcast.py        rules: additions at peers; values that one thread broadcasts to its unit
polling.py                          atomic loads of whole units, and bounds of loops that poll or wait
exchange.py                         rules: collectives of devices on tiles
hierarchical.py                     rules: collectives between groups of devices that share memory
workspace_slots.py                  workspace slots for resident programs
dynamic_trip_count.py               pipelined loops of dynamic trip count, on machines that wait for groups of copies
implemented.py                      algorithms for each collective
tile.py combine.py                  a unit's tile, and the combination of several units' elements
hazards.py touches.py               barriers where statements of a unit touch the same memory
order_state.py                      earlier accesses, and what a new one needs before it
thread_maps.py                      the thread of a unit that makes an access
places.py                           whether two stores in different iterations collide
kernel.py                           the last stage: the function with all its parameters
arguments.py                        parameters of a generated kernel
call_barriers.py                    barriers of all devices at begin and end of a call, and those inside its kernel
check.py text_rewrites.py           checks of the generated text, and its rewrites before compilation

Folders: `clusters` (programs of a cluster) and `groups` (units inside a program), a stage each; `copies` (a mechanism
each); `role_graph` (roles of threads, and the channels between them).
"""
