# SPDX-License-Identifier: MIT
"""What operations do, a family a file.

    tiles.py multicast.py   TileLang's operations on tiles
    threads.py atomics.py   indices, shuffles, votes; atomics on elements
    barriers.py     mbarriers, barriers of programs and clusters, `T.barrier`
    externs.py      functions that are called by name
    pointers.py     arguments that point to elements
    remote.py       copies to and from a peer, signals, waits
    collectives.py pieces.py gathers.py     collectives: on tiles, by pieces; gathers that copy queues make
"""
