# SPDX-License-Identifier: MIT
"""Kernels and device phases, run in order on the caller's stream."""
