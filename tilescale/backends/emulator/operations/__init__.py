# SPDX-License-Identifier: MIT
"""What operations do, a family a file.

    tiles.py multicast.py threads.py externs.py     TileLang's: on tiles, of threads, functions that are called by name
    remote.py       copies to and from a peer, signals, waits
    collectives.py pieces.py gathers.py     collectives: on tiles, by pieces; gathers that copy queues make
"""
