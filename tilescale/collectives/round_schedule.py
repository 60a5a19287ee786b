# SPDX-License-Identifier: MIT
"""A collective as rounds of messages between units numbered from 0: senders, targets and pieces of the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

BARRIER = 0
"""Pieces of a message that only says "I am here"."""

SEGMENTS = 4
"""Number of segments into which pipelined algorithms cut tensors, on every back end."""


@dataclass(frozen=True, eq=False)
class Round:
    """Concurrent messages, each field an array with one entry a message.

    A message carries the pieces `first`, `first + stride`, ..., `count` of them. All are read before any arrives.

    Attributes:
        combine: whether the target combines received values with its own, else it replaces its own. All values received
            in a round are combined at once, in the order of ranks, and rounded once.
        by_host: whether the host starts the messages, else programs do.
    """

    source: Numbers
    target: Numbers
    first: Numbers
    count: Numbers
    combine: NDArray[np.bool_]
    stride: int = 1
    by_host: bool = False

    @property
    def traffic(self) -> tuple[int, ...]:
        """The identity of the arrays of senders and sizes: those of a ring's rounds are the same."""
        return id(self.source), id(self.target), id(self.count), id(self.combine), self.stride, self.by_host

    @staticmethod
    def of(
        source: Numbers,
        target: Numbers | int,
        first: Numbers | int = 0,
        count: Numbers | int = 1,
        combine: NDArray[np.bool_] | bool = False,
        stride: int = 1,
    ) -> Round:
        """A round whose fields may be given once for all messages."""
        length = len(source)

        def each(values: Numbers | int) -> Numbers:
            return values if isinstance(values, np.ndarray) else _repeated(int(values), length)

        combines = combine if isinstance(combine, np.ndarray) else _repeated(bool(combine), length)
        return Round(source, each(target), each(first), each(count), combines, stride)

    @staticmethod
    def joined(rounds: Sequence[Round]) -> Round:
        """One round with the messages of several of the same stride and starter."""
        return replace(
            rounds[0],
            source=np.concatenate([r.source for r in rounds]),
            target=np.concatenate([r.target for r in rounds]),
            first=np.concatenate([r.first for r in rounds]),
            count=np.concatenate([r.count for r in rounds]),
            combine=np.concatenate([r.combine for r in rounds]),
        )


@dataclass(frozen=True, eq=False)
class RoundSchedule:
    """A collective over `units` units by some algorithm.

    Attributes:
        operation: as in the language, e.g. "allreduce".
        pieces: number of pieces of the whole tensor. The whole is the result of an all-gather, the input of one unit in
            an all-to-all, and the tensor of every unit elsewhere.
        home: for each piece, the unit that ends (reduce-scatter) or begins (all-gather) with it. An all-to-all has
            `pieces` of each unit: piece s * units + d goes from unit s to unit d.
    """

    operation: str
    units: int
    pieces: int
    rounds: tuple[Round, ...]
    home: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))


@lru_cache(maxsize=256, typed=True)
def _repeated(value: int | bool, length: int) -> NDArray[Any]:
    return np.broadcast_to(np.asarray(value, bool if isinstance(value, bool) else np.int64), (length,))


def lift(rounds: Iterable[Round], members: Numbers, base: Numbers | None = None, scale: int = 1) -> Iterable[Round]:
    """The rounds of one group, played by many groups at the same time.

    Args:
        members: [group, position in the group] -> unit.
        base: for each group, the piece that is its first.
        scale: how many pieces of the whole are one piece of the group.
    """
    groups, _ = members.shape
    offset = np.zeros((groups, 1), np.int64) if base is None else base[:, None]
    lifted: dict[tuple[int, ...], tuple[Round, Round]] = {}  # traffic -> a round that has it, and its messages
    for r in rounds:
        like = r.traffic
        if like not in lifted:  # the round is kept, as others may else be given the addresses of its arrays
            lifted[like] = r, _lift(r, members, scale)
        yield replace(lifted[like][1], first=(offset + r.first * scale).ravel())


def _lift(r: Round, members: Numbers, scale: int) -> Round:
    shape = (len(members), len(r.source))
    return replace(
        r,
        source=members[:, r.source].ravel(),
        target=members[:, r.target].ravel(),
        count=np.broadcast_to(r.count * scale, shape).ravel(),
        combine=np.broadcast_to(r.combine, shape).ravel(),
    )


def everyone(units: int) -> tuple[Numbers, Numbers]:
    """Sources and targets of messages from every unit to every other one."""
    source, target = np.divmod(np.arange(units * units), units)
    others = source != target
    return source[others], target[others]
