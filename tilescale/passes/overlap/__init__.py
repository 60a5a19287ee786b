# SPDX-License-Identifier: MIT
"""Overlap of collectives with the grids around them, as a rewrite from programs to programs of the same language."""
