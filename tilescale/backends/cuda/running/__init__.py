# SPDX-License-Identifier: MIT
"""Kernels and device phases, run in order on the caller's stream.

execute.py program_context.py           a program: built once, called with tensors; its interface to steps
recording.py repeated.py                functions of tensors that call programs, recorded; which calls of them are
steps.py plans.py replay.py             steps bound to a call's arguments, kept for the next call, as a CUDA graph
graph_nodes.py native.py                arguments of a graph's nodes; calls of known forms, in C
memory.py                               arguments of kernels, workspaces
grids.py toolchain.py                   compilation once for a node, launches; the compiler, trust in cached kernels
concurrent_grids.py                     concurrent grids
phases.py collectives/ nccl.py          operations of the host: copies, collectives; NCCL's groups
peer_group.py messages.py transports.py devices that share memory; copies and signals to others; their transport
queued.py copy_queue.py sums.py         asynchronous copies on the device's copy queue, also to other nodes
queued_exchange.py                      collectives there, with:
queue_parts.py                          tensors and flags of both;
stream_memory.py queue_watch.py         memory operations of streams without an SM; bounds of their waits
control.py                              loops and branches around phases
wait_guard.py                           protection from hangs, with:
timeouts.py diagnosis.py                failed waits, and the errors about them
moments.py                              when waits and signals began and ended
barrier_kernel.py stream_order.py       all ranks synchronize; order on streams, waiting for the device
driver.py streams.py                    calls of the CUDA driver; streams that are not shared
ahead.py                                kernels known before a program is built: compiled in parallel
services.py                             what other parts of TileScale reach by the manifest
agreement.py occupancy.py               before a launch: agreement of ranks, residency of grids that wait
"""
