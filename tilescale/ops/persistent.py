# SPDX-License-Identifier: MIT
"""Items of a persistent grid: block b takes items b, b + blocks, b + 2 blocks, and so on."""

from typing import Any

import tilescale.language as T


def iterations_of(block: Any, blocks: Any, items: Any) -> Any:
    """Trip count of a block over `items` items that all blocks of a grid share."""
    return T.ceildiv(items - block, blocks)


def iterations_of_first(block: Any, blocks: Any, items: Any) -> Any:
    """Trip count of a block where only the first `blocks` of a grid take items."""
    return T.if_then_else(block < blocks, iterations_of(block, blocks, items), 0)
