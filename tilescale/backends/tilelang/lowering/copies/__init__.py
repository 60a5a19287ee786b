# SPDX-License-Identifier: MIT
"""Copies between units: one file for each mechanism, which registers its rule.

peer_memory.py               between devices, by bulk copies and by loads and stores of threads
rows.py                      copies of device-side numbers of rows, local ones too
nvshmem.py                   between devices, by NVSHMEM, where a program asks for it
dsmem.py                     between programs of a cluster, through distributed shared memory
shared.py                    between units of a program, through its shared memory

Copies by the host (copy engine, NCCL) have no rule here: they are planned as host steps.
"""
