# SPDX-License-Identifier: MIT
"""Plain TileLang kernels (no distributed additions) with inputs and float64 references, for several test families."""
