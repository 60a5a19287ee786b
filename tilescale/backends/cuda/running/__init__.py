# SPDX-License-Identifier: MIT
"""Kernels and device phases, run in order on the caller's stream.

execute.py owner.py               a program: built once, called with tensors; what its steps know of it
recording.py                      functions of tensors that call programs, recorded
steps.py plans.py replay.py       steps bound to a call's arguments, kept for the next call, as a CUDA graph
graph_nodes.py native.py          what the work of a graph is passed; calls of known forms, in C
memory.py                         what kernels are passed
grids.py toolchain.py             compilation once for a node, launches; the compiler, and whose kernels are run
beside.py                         grids that run at once
phases.py collectives/ nccl.py    operations of the host: copies, collectives; NCCL's groups
near.py messages.py transports.py devices that share memory; copies and signals to others; what carries them
queued.py copy_queue.py sums.py   asynchronous copies beside them, on the device's copy queue
queued_exchange.py                collectives there, and queued_between.py: copies to other nodes, with:
queue_parts.py                    tensors and flags as both take them;
stream_memory.py queue_watch.py   what streams do to memory without a processor; bounds of their waits
control.py                        loops and branches around phases
guard.py                          what keeps a program from hanging, with:
timeouts.py diagnosis.py          waits that failed, and what is said of them
barrier_kernel.py streams.py      all ranks synchronize; order on streams, waiting for the device
driver.py own_streams.py          calls of the CUDA driver; streams that nobody else has
ahead.py                          kernels that are known before a program is made: compiled at once
agreement.py occupancy.py         before a launch: kernels compile on all ranks, all programs that wait fit
"""
