# SPDX-License-Identifier: MIT
"""Semantics of operations, a family a file.

    tiles.py multicast.py   TileLang's operations on tiles
    blockscaled.py  block-scaled GEMMs
    reducers.py     results that iterations contribute to
    threads.py atomics.py   indices, shuffles, votes; atomics on elements
    allreduce.py random.py  reductions over threads; random numbers
    mma.py          GEMMs of a warp's registers
    wgmma.py tcgen05.py descriptors.py  GEMMs of a warpgroup and in tensor memory; matrix descriptors of shared memory
    words.py        loads and stores of several elements, cp.async, ldmatrix
    barriers.py     mbarriers, barriers of programs and clusters, `T.barrier`
    externs.py stand_ins.py external functions by name, and the user's Python stand-ins for them
    decoders.py     stand-ins for functions of TileLang's examples
    pointers.py     pointer arguments
    remote.py       copies to and from a peer, signals, waits
    peer_atomics.py atomic additions at a peer; operations by one thread of a unit
    collectives.py pieces.py gathers.py     collectives: on tiles, by pieces; gathers by copy queues
    float8_lines.py                         collectives that send float8
    unequal.py      all-to-all of unequal parts
"""
