# SPDX-License-Identifier: MIT
"""What a hierarchical tile program is made of: our operations, layouts, and the structure above the grid's TIR."""
