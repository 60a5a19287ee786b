# SPDX-License-Identifier: MIT
"""Sizes of decoder layers in a decode step, and of the tasks that their phases are divided into."""

from dataclasses import dataclass

from tilescale.ops.softmax import base2

ROWS, DEPTH, THREADS = 64, 128, 128
"""Outputs of a tile of a product; elements of K in a step; threads of a block."""

SPAN, QUERIES, COLUMNS = 64, 64, 128
"""Keys of a task of attention, its rows of queries, padded; features of a task of elementwise phases."""

SLAB = 64 << 10
"""Bytes of activations of a task of a product, at most: the rest of shared memory is for weights."""

MOST = 16
"""Sequences, at most."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of decoder layers on each rank: by default those of Llama 3 8B on one.

    Attributes:
        batch: sequences.
        keys: capacity of the cache of each, in tokens.
        layers: decoder layers, one after the other.
        epsilon: of the norms.
        head_norms: whether queries and keys are normalized, as in Qwen3.
        blocks: of the launch: SMs of a device.
    """

    batch: int = 1
    devices: int = 1
    hidden: int = 4096
    heads: int = 32
    groups: int = 8
    width: int = 128
    inner: int = 14336
    keys: int = 1024
    layers: int = 1
    epsilon: float = 1e-5
    head_norms: bool = False
    blocks: int = 132

    @property
    def rows(self) -> int:
        """Rows of activations: what tensor cores take at once."""
        return 8 if self.batch <= 8 else 16

    @property
    def scale(self) -> float:
        """Factor of scores whose exponentials are powers of two."""
        return base2(None, self.width)

    @property
    def tiles(self) -> int:
        """Tiles of keys of a task of attention: as many as leave each block a task."""
        return self.each(self.groups * self.batch, self.keys // SPAN)

    @property
    def spans(self) -> int:
        """Tasks of attention of a group of heads of a sequence."""
        return self.keys // SPAN // self.tiles

    def each(self, tasks: int, count: int = 0) -> int:
        """Items of `count`, or rows, of one task, such that `tasks` for each of these parts fit the blocks at once."""
        count = count or self.batch
        return next((n for n in divisors(count) if tasks * count // n <= self.blocks), count)

    def parts(self, outputs: int, inputs: int) -> int:
        """Parts of K of a product: the fewest with which the busiest block loads the fewest weights."""
        tiles, steps = outputs // ROWS, inputs // DEPTH
        fits = [n for n in divisors(steps) if n <= self.blocks and 2 * self.rows * inputs // n <= SLAB]
        return min(fits or [steps], key=lambda n: (self.each(n, tiles) * steps // n, n))

    @property
    def projected(self) -> int:
        """Features of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.width

    @property
    def combines_early(self) -> bool:
        """Whether attention over all keys is a phase; else each task of its projection combines what it multiplies."""
        return self.batch > 1 or self.width != DEPTH


def divisors(n: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]
