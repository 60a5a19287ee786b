# SPDX-License-Identifier: MIT
"""What operations do, a family a file.

    tiles.py multicast.py rows.py   TileLang's operations on tiles
    blockscaled.py  products of operands with scales
    reducers.py     results to which iterations contribute
    threads.py atomics.py   indices, shuffles, votes; atomics on elements
    allreduce.py random.py  reductions over threads; random numbers
    mma.py          products of a warp's registers
    wgmma.py tcgen05.py descriptors.py  products of a warp group and in tensor memory, of matrices in shared memory
    words.py        loads and stores of several elements, cp.async, ldmatrix
    barriers.py     mbarriers, barriers of programs and clusters, `T.barrier`
    externs.py stand_ins.py functions that are called by name, and Python functions for those of the user
    decoders.py     stand-ins for functions of TileLang's examples
    pointers.py     arguments that point to elements
    remote.py       copies to and from a peer, signals, waits
    peer_atomics.py atomic additions at a peer; what one thread does for its unit
    collectives.py pieces.py gathers.py     collectives: on tiles, by pieces; gathers that copy queues make
    unequal.py      the all-to-all of unequal parts
"""
