# SPDX-License-Identifier: MIT
"""From a program to plain TileLang functions and operations of the host.

program.py                   a program for a target: the same tree of parts, each lowered
plan.py spread.py            device phases taken apart into operations of the host and grids
host_step.py messages.py     what the host starts; copies and signals between devices that share no memory
reach.py between.py          which devices share memory; what carries tensors, and operations of programs, to others
queued.py                    what a device's copy queue executes, and why not the rest
branches.py                  programs of a grid that take different branches: a grid each
stages.py phase.py           from a grid phase to a kernel: all stages in order, and what one hands to the next
registry.py markers.py       how each operation is lowered; what stages mark for later ones
statements.py                what a statement is
deferred.py senders.py       copies and signals that are completed later: at the end of a turn, by who only sends
devices.py signature.py      the stage of devices, and the parameters that it asks for
operands.py                  peers, values and flag indices that are read from memory
signals.py completion.py     rules: signals, waits and barriers, and where copies are complete
peer_atomics.py told.py      rules: additions at peers; values that one thread finds out for all threads of its unit
polling.py                   atomic loads of whole units, and bounds of loops that poll or wait
exchange.py                  rules: collectives of devices on tiles
rails.py                     the same between devices of which groups share memory
window.py                    places in their workspaces for programs that are on a device at once
unknown_ends.py              pipelined loops of unknown length, on machines that wait for groups of copies
implemented.py               which algorithms there are for which collective
tile.py combine.py           a tile as a unit holds it, and how elements of several units combine
hazards.py touches.py        barriers where statements of a unit touch the same memory
order_state.py               what was touched, and what a further touch needs before it
thread_maps.py               which thread of a unit makes an access
places.py                    whether two stores in different iterations collide
kernel.py                    the last stage: the function with all its parameters
arguments.py                 what a generated kernel takes
rendezvous.py                where all devices synchronize when a call begins and ends, and when its kernel does it
check.py vectors.py          the generated text before it is compiled: what must not run, stores that stay whole
gemm_waits.py                GEMMs that end in their step

Folders: `clusters` (programs of a cluster) and `groups` (units inside a program), a stage each; `copies` (a mechanism
each); `role_graph` (roles of threads, and the channels between them).
"""
