# SPDX-License-Identifier: MIT
"""Parts of a hierarchical tile program: our operations, layouts, and the structure above the grid's TIR."""

from tilescale.program import no_source as no_source
