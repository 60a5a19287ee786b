# SPDX-License-Identifier: MIT
"""Checks on real GPUs: scripts that one job each runs, and `plugin.py`, which runs the emulator's tests on devices."""
