# SPDX-License-Identifier: MIT
"""Membership of a job, with the guarantees of docs/security.md.

key.py            the secret of a job, and where it comes from
key_exchange.py   how ranks of one host get one that no launcher gave them
same_user.py      sockets between processes of one user
handshake.py      the proof that both sides of a connection know the key
records.py        signed values and logs
"""
