# SPDX-License-Identifier: MIT
"""Fusion of a program's grids and collectives into one launch of persistent blocks: `schedule="persistent"`."""
