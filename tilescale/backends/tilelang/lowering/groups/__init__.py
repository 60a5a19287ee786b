# SPDX-License-Identifier: MIT
"""Thread groups: units inside a program (warpgroups, warps, threads) as exclusive branches of its threads."""
