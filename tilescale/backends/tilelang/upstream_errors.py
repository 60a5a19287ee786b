# SPDX-License-Identifier: MIT
"""Errors of stock TileLang as errors of TileScale: the user's line, the cause, and the remedy."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilelang_core import ir
from tilescale.backends.tilelang.lowering.check import GeneratedTextError
from tilescale.errors import Location, ShapeError, TileScaleError, UnsupportedError
from tilescale.passes.faults import fault, line_of_failure

_OURS = (TileScaleError, GeneratedTextError, OSError, MemoryError)
_PACKAGES = ("tilescale", "tilelang_core")


@dataclass(frozen=True)
class KnownError:
    """A known error of TileLang, by a part of its message, and its meaning; {0} is the first group of the part."""

    part: str
    error: type[TileScaleError]
    message: str
    hint: str


_EVEN = (
    "let the number of elements be a multiple of the number of threads, by a larger tile (copies fill what is beyond a "
    'tensor with 0) or other threads=, or put the tile into shared memory (level="l1"), where a loop of T.Parallel '
    "clears tiles of any size; let the extents of a tile that is reduced, or has three dimensions, be powers of two"
)
KNOWN = (
    KnownError(
        r"No valid warp partition for T\.gemm: M=(\d+), N=(\d+) .*? by (\d+) warps",
        ShapeError,
        "T.gemm of {0} x {1}: {2} warps cannot share it out: each takes a multiple of 16 rows and of 8 columns",
        "launch fewer threads, or make the tile larger",
    ),
    KnownError(
        r"no available layout found|Layout Layout\(.* has errors",
        ShapeError,
        "the elements of a tile in registers, of three dimensions, or in T.clear or T.fill cannot be distributed "
        "evenly over the threads",
        _EVEN,
    ),
    KnownError(
        r"The layout for fragment (\w+) can not be inferred",
        UnsupportedError,
        "no operation on the tile {0} in registers determines which thread holds which of its elements",
        "read it (T.copy, T.Parallel, T.gemm, T.reduce_sum), or leave it out",
    ),
    KnownError(
        r"The layout of fragment (\w+) has no place for some elements",
        UnsupportedError,
        "some elements of the tile {0} in registers would be lost: TileLang distributes the tile over threads by a "
        "statement that uses only a part of it, or uses it in decreasing order",
        'use it as a whole and in order, or put it into shared memory (level="l1"), or declare fewer elements',
    ),
    KnownError(
        r"Cannot lower a required shared-memory sync inside the then branch",
        UnsupportedError,
        "threads must synchronize inside a loop over a tile in shared memory that not all of them execute",
        "let the number of elements be a multiple of the number of threads, or write to another tile than is read",
    ),
    KnownError(
        r"ReduceOp cannot lower a layout where",
        UnsupportedError,
        "the threads that hold the tile in registers, as T.gemm has left it, cannot reduce it along this dimension",
        "copy it into a tile in shared memory, and from there into another one in registers, and reduce that",
    ),
    KnownError(
        r"XOR-butterfly AllReduce requires .*? power of two, got (\d+)",
        ShapeError,
        "the elements that are reduced to one lie on {0} threads, or so far apart, which is not a power of two",
        "let the extents of the tile, and the number of threads, be powers of two",
    ),
    KnownError(
        r"Inconsistent layouts between src and dst in ReduceOp",
        UnsupportedError,
        "the result of a reduction lies on other threads than the tile that is reduced",
        "reduce into a tile of its own, and copy that",
    ),
    KnownError(
        r"Not a canonical GMMA_\w+ layout",
        UnsupportedError,
        "T.gemm: the matrix instructions of this machine cannot read an operand of this shape from shared memory",
        "let the inner dimension be at least 16, and rows and columns multiples of 8 that are powers of two",
    ),
)


@contextlib.contextmanager
def explained(func: ir.PrimFunc, lower: Callable[[ir.PrimFunc], object], where: Location | None) -> Iterator[None]:
    """Context that turns errors of TileLang into errors of TileScale.

    Args:
        func: the function that is lowered.
        lower: lowers another such function, to find the failing statement.
        where: the line to name where no statement is found.

    Raises:
        ShapeError, UnsupportedError, UsageError: instead of them.
        InternalError: instead of a bug of TileScale.
    """
    try:
        yield
    except _OURS:
        raise
    except Exception as error:
        meant = _meaning(error)
        raise meant.at(*filter(None, [_where(func, lower, meant) or where])) from error


def _meaning(error: Exception) -> TileScaleError:
    """The known error that matches TileLang's message."""
    said = str(error)
    for known in KNOWN:
        found = re.search(known.part, said, re.DOTALL)
        if found is not None:
            return known.error(known.message.format(*found.groups()), hint=known.hint)
    if _internal(error):
        return fault(error)
    first = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    hint = "write it differently; the cause of this error has TileLang's whole message"
    return UnsupportedError(f"TileLang cannot compile this: {first[:300]}", hint=hint)


def _internal(error: Exception) -> bool:
    """Whether `error` is a bug of TileScale: raised there, or below outside of TileLang, by wrong arguments."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    below = packages[max((n + 1 for n, package in enumerate(packages) if package in _PACKAGES), default=0) :]
    return not below or ("tilelang" not in below and not isinstance(error, ValueError))


def _where(func: ir.PrimFunc, lower: Callable[[ir.PrimFunc], object], meant: TileScaleError) -> Location | None:
    """The line of the first statement with which a function fails with the same error."""
    return line_of_failure(func, lower, lambda error: _meaning(error).message == meant.message)
