# SPDX-License-Identifier: MIT
"""Warp specialization of a grid phase: roles of threads, and the channels through which they hand tiles over."""
