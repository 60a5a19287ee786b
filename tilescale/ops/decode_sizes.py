# SPDX-License-Identifier: MIT
"""Sizes of decoder layers in a decode step, and of the tasks that their phases are divided into."""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from tilescale.ops.softmax import base2

DEPTH, THREADS = 128, 128
"""Elements of K in a step of a GEMM; threads of a block."""

TILE = 16 << 10
"""Bytes of a tile of weights."""

SPAN, QUERIES, COLUMNS = 64, 64, 128
"""Keys of a tile of attention; queries that share them, at most; features of a task of elementwise phases."""

SLAB = 64 << 10
"""Bytes of activations of a task of a GEMM, at most: the rest of shared memory is for weights."""

ROWS = 64
"""Outputs of a tile of the weights of experts and of the router."""

MOST = TOKENS = 16
"""Sequences, at most: the rows that tensor cores take of a left operand."""

GATED = 16, 64
"""Outputs of the gate in a task of experts: a multiple of the first, at most the second."""

FLOAT8 = "float8_e4m3fn"


PHASE = 80 << 10
"""Bytes of results that a block reads and writes in the time of a phase more (H200: about 2.5 us)."""

LINK = 8
"""Bytes that a block reads from the cache in the time in which one is sent to another device (H200)."""

MADE = 32
"""Steps of K, of all sequences, whose activations a task makes, at most: they are in registers."""

STEPS = 4
"""Steps of K of a task of a GEMM, at least, where it has as many: each tile of weights has some work of its own."""


class Parts(NamedTuple):
    """Parts of K of each GEMM: of queries, keys and values; of attention's projection; of the MLP's two."""

    into: int
    out: int
    up: int
    down: int


class Made(NamedTuple):
    """Whether the tasks of each GEMM make their activations; else a phase does."""

    into: bool
    out: bool
    up: bool
    down: bool


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of decoder layers on each rank: by default those of Llama 3 8B on one.

    Attributes:
        batch: sequences.
        devices: ranks that share the layers.
        hidden: features of a token.
        heads: query heads of a rank.
        groups: key-value heads of a rank.
        width: features of a head.
        inner: features of the MLP, or of an expert, on a rank.
        keys: capacity of the cache of each, in tokens.
        layers: decoder layers, one after the other.
        epsilon: of the norms.
        head_norms: whether queries and keys are normalized, as in Qwen3.
        blocks: of the launch: SMs of a device.
        weights: their type, bfloat16 or float8_e4m3fn.
        page: keys of a page of the cache; 0 where the keys of a sequence are contiguous.
        pages: of the cache.
        squares: whether a scale of float8 weights is that of 128 x 128 of them, else of an output.
        experts: of the MLP, each of `inner` features; 0 for one MLP for all tokens.
        choices: experts of a token.
        normalizes: whether the weights of a token's experts are divided by their sum.
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
    weights: str = "bfloat16"
    squares: bool = True
    page: int = 0
    pages: int = 0
    experts: int = 0
    choices: int = 0
    normalizes: bool = True

    @property
    def is_float8(self) -> bool:
        return self.weights == FLOAT8

    @property
    def terms(self) -> int:
        """Numbers of the weights' type whose sum is an activation: see decode_float8.py."""
        return 2 if self.is_float8 else 1

    @property
    def nbytes(self) -> int:
        """Bytes of a weight, and of each term of an activation."""
        return 1 if self.is_float8 else 2

    @property
    def rows(self) -> int:
        """Rows of activations: a multiple of 8, as tensor cores take them."""
        return -(-self.terms * self.batch // 8) * 8

    @property
    def queries(self) -> int:
        """Rows of a group's queries, padded likewise."""
        return -(-(self.heads // self.groups) // 8) * 8

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of weights, which are outputs."""
        return TILE // (DEPTH * self.nbytes)

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

    @property
    def attends(self) -> int:
        """The same, and one of the new token where a block is left for it: all others wait for the longest task."""
        return self.spans + (self.tiles == 1 and (self.spans + 1) * self.groups * self.batch <= self.blocks)

    @property
    def scores(self) -> int:
        """Columns of the router's logits: those of the experts, padded to tiles of tensor cores."""
        return -(-self.experts // ROWS) * ROWS

    @property
    def slots(self) -> int:
        """Experts that are chosen, at most."""
        return min(self.experts, self.batch * self.choices)

    @property
    def gated(self) -> int:
        """Outputs of the gate of a task: as many as leave the busiest block the fewest, with every slot taken."""
        low, high = GATED
        fits = [n for n in divisors(self.inner) if n % low == 0 and n <= high]
        return min(fits, key=lambda n: (-(-self.slots * self.inner // n // self.blocks) * n, -n))

    @property
    def down_parts(self) -> int:
        """Parts of the slots in the second GEMM of experts: as many as leave each block a task."""
        return max(min(self.blocks // (self.hidden // ROWS), self.choices), 1)

    def each(self, tasks: int, count: int = 0) -> int:
        """Items of `count`, or rows, of one task, such that `tasks` for each of these parts fit the blocks at once."""
        count = count or self.batch
        return next((n for n in divisors(count) if tasks * count // n <= self.blocks), count)

    @functools.cached_property
    def parts(self) -> Parts:
        """Those that move the fewest bytes of results; where phases make all activations, the fewest parts.

        For 16 sequences more parts took 582 us instead of 570 (H200, four layers of Llama 3 8B).
        """
        able = [self.able(self.projected, self.hidden), self.able(self.hidden, self.heads * self.width)]
        if self.experts:
            able += [[1], [self.down_parts]]
        else:
            able += [self.able(2 * self.inner, self.hidden), self.able(self.hidden, self.inner)]
        found = min((Parts(*parts) for parts in itertools.product(*able)), key=self.moved)
        return found if any(self._made(found)) else Parts(*map(min, able))

    @functools.cached_property
    def made(self) -> Made:
        """Whether a task makes its activations: where it reads fewer bytes, counting those of a phase's time."""
        return self._made(self.parts)

    def _made(self, parts: Parts) -> Made:
        return Made(*(here < apart for here, apart in self._inputs(parts)))

    def able(self, outputs: int, inputs: int) -> list[int]:
        """Numbers of parts of K with which the busiest block loads the fewest weights."""
        tiles, steps = outputs // self.tile_rows, inputs // DEPTH
        row = self.rows * self.nbytes * inputs
        fits = [n for n in divisors(steps) if n <= self.blocks and row // n <= SLAB] or [steps]
        loads = [self.each(n, tiles) * steps // n for n in fits]
        fewest = [n for n, load in zip(fits, loads, strict=True) if load == min(loads)]
        return [n for n in fewest if steps // n >= STEPS] or fewest[:1]

    def moved(self, parts: Parts) -> float:
        """Bytes of results that a block reads and writes in a layer."""
        read = sum(map(min, self._inputs(parts))) + 4 * parts.into * (self.heads // self.groups + 2) * self.width
        outputs = self.projected, self.hidden, 2 * self.inner, self.hidden
        return read + sum(4 * n * self.batch * each / self.blocks for n, each in zip(outputs, parts, strict=True))

    def _inputs(self, parts: Parts) -> list[tuple[float, float]]:
        """The bytes that a block reads for each GEMM, if its tasks make the activations, and if a phase does."""
        never = float("inf")
        here, apart = self._input(2 * (self.spans + 1), self.heads * self.width, parts.out)  # with the weights of spans
        into, up = self._summed(parts.down, parts.into), self._summed(parts.out, parts.up)
        of_attention = (here if self.width == DEPTH else never, apart)
        if self.experts:
            return [into, of_attention, (never, 0), (never, 0)]
        return [into, of_attention, up, self._input(2 * parts.up, self.inner, parts.down)]

    def _summed(self, sources: int, parts: int) -> tuple[float, float]:
        """The same for the residual stream and parts of a sum: devices send each part, or in a phase the sum alone."""
        here, apart = self._input(sources + 1, self.hidden, parts)
        sent = LINK * 4 * self.hidden * self.batch * (self.devices - 1) / self.blocks
        return here + sources * sent, apart + sent

    def _input(self, sources: int, features: int, parts: int) -> tuple[float, float]:
        """The same for a GEMM of `features` inputs in `parts`, each of which is made of `sources` numbers."""
        numbers = features * self.batch
        tasks = min(features // COLUMNS * self.batch, self.blocks)
        apart = 4 * sources * numbers / tasks + self.terms * self.nbytes * numbers / parts
        here = 4 * sources * numbers / parts if numbers // DEPTH <= MADE * parts else float("inf")
        return here, PHASE + apart

    def tasks(self, outputs: int, parts: int) -> tuple[int, int]:
        """Tasks of a GEMM along its outputs and along K, of some parts."""
        tiles = outputs // self.tile_rows
        return tiles // self.each(parts, tiles), parts

    def scales(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Shape of the scales of all layers' weights; one number where there are none."""
        if not self.is_float8:
            return 1, 1, 1
        return self.layers, *((outputs // DEPTH, inputs // DEPTH) if self.squares else (outputs, 1))

    def factors(self, features: int) -> tuple[int, int]:
        """Shape of the factors of activations; one number where there are none."""
        return (features // DEPTH, self.batch) if self.is_float8 else (1, 1)

    @property
    def cache(self) -> tuple[int, ...]:
        """Shape of all layers' keys, and of their values."""
        if self.page:
            return self.layers, self.pages, self.page, self.groups, self.width
        return self.layers, self.batch, self.groups, self.keys, self.width

    @property
    def table(self) -> tuple[int, int]:
        """Shape of the block table; one number without pages."""
        return (self.batch, self.keys // self.page) if self.page else (1, 1)

    @property
    def projected(self) -> int:
        """Features of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.width


def divisors(n: int) -> list[int]:
    """The divisors of a number, in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]
