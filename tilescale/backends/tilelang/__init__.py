# SPDX-License-Identifier: MIT
"""Common parts of the back ends that generate text by stock TileLang: `cuda` and `hip`.

limits.py   shapes that no lowering can distribute over a number of threads
ptx.py      constants of the PTX ISA and the driver for all GPUs
text.py     the text of a kernel, checked
upstream_errors.py  errors of stock TileLang, with the user's line
nvshmem_link.py     linking and initialization of kernels that call NVSHMEM

Folders: `lowering` (a program to TileLang functions), `headers` (device functions).
"""
