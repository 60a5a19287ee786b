# SPDX-License-Identifier: MIT
"""Device functions in HIP C++ for AMD GPUs, which those of `tilescale/backends/tilelang/headers` call.

memory.cuh: accesses, fences and the clock; adders.cuh: atomic additions.
"""
