# SPDX-License-Identifier: MIT
"""From a program to plain TileLang functions and operations of the host.

program.py                  a program for a target: the same tree of parts, each lowered
plan.py spread.py           device phases taken apart into operations of the host and grids
queued.py                   what a device's copy queue executes, and why not the rest
lower.py                    one grid phase to a TileLang function: the rank dimension, hidden arguments, the walk
roles.py statements.py      what a loop's producer executes: loads, and the waits before them
deferred.py senders.py      copies and signals that are completed later: at the end of a turn, by who only sends
completion.py               where copies are complete, and which thread signals it
peers.py exchange.py        rules: copies and signals between devices, collectives of devices on tiles
implemented.py              which algorithms there are for which collective
combine.py                  how elements of several units combine
nvshmem.py                  rule: copies by NVSHMEM where a program asks for it
arguments.py signature.py   what a generated kernel takes
rendezvous.py               where all devices meet when a call begins and ends, and when its kernel does it
check.py                    the generated text before it is compiled

Folders: `lanes` (units inside a program), `clusters` (programs of a cluster).
"""
