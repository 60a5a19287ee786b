# SPDX-License-Identifier: MIT
"""Schedules: the decision for each collective of a program, as an object that users can print, edit and pass back.

A schedule lists the collectives of whole tensors in program order. `str` of it gives each decision and its reason, line
by line; `tilescale.compile(..., schedule=changed)` takes one that was changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilescale.errors import Location, UsageError
from tilescale.hda.units import format_time
from tilescale.program.preformatted import preformatted

QUEUE, TILES, COLLECTIVE, GRID, ACCUMULATORS = "queue", "tiles", "collective", "grid", "accumulators"
"""Carriers of rows: the copy queue of a device, the tiles that produce them, or a collective of each such tile.
Reducers: the tiles, a grid after them, or the accumulators of the tiles before these are rounded."""

CALLER = "caller"
"""Carrier of a gather whose rows an earlier program of the caller has moved to the same memory."""

CARRIERS = (QUEUE, TILES, COLLECTIVE, CALLER)

ADDS = (TILES, GRID, ACCUMULATORS)

SOURCE = "source"
"""Tiles read local rows of a gather from its source."""

WIRES = ("bfloat16", "float16")
"""Types that the parts of a reduction may be rounded to for their way."""

ANY = "any"
"""Leaves to the cost model whether they are rounded, to the first of these, whose range is that of float32."""


@dataclass
class Move:
    """Schedule of one collective.

    Attributes:
        collective: its name, "all_gather"; or "shift", copies of tensors to a peer.
        tensors: names of the source and the target.
        overlapped: whether it runs concurrently with the grid that produces or reads its data.
        chunk: rows that are sent together, columns where the `axis` is 1; None leaves the choice to the cost model.
        carrier: the carrier of the rows of a reduction, "queue" or "tiles"; None leaves the choice between these to the
            cost model. Or "collective": programs all-reduce each tile before they store it. Of a gather with `local`:
            "caller" if an earlier program has moved the rows to the same memory, a parameter of both: none are sent;
            of one with `group` or `blocks`, but without `local`: "queue".
        adds: the reducer of local rows and the received parts: "tiles" where possible (also the meaning of None), or
            "grid", a separate grid. Or "accumulators": tiles add them before they are rounded, local rows unrounded and
            first, the others in the order in which they were sent.
        wire: the type to which the parts of a reduction are rounded for sending, one of `WIRES`; "any" if the cost
            model may choose that; None leaves them in the type of the tensor. Sums are taken in float32 all the same.
        ordered: whether the tiles of the grid are put into the order in which rows are sent.
        local: "source" to let tiles of an all-gather, or of an all-to-all of a tensor that is there before, read local
            rows from its source, where only they read its result, or to copy none that no tile reads; None copies them.
        group, blocks: where local rows are read from the source, or a carrier other than "tiles" is named, the rows of
            tiles that are rasterized together, and the programs of a persistent grid; None leaves the grid as it is.
        chunks: most chunks of a part, where its rows are known at launch only: there is a flag for each; with 1, the
            rows of a part are sent together. None makes flags for each new number of rows.
        slices: slices of columns in which a gather sends the rows of a part, where `local` is "source" and tiles
            iterate over these columns; None sends whole rows.
        where: the user's line.
        why: the reason, in words.
        in_order_s, overlapped_s: seconds that it is estimated to take with its grids, in order and overlapped.
        estimates: the same seconds for each carrier, None where there is one only, and number of rows in question.
    """

    collective: str
    tensors: tuple[str, str]
    overlapped: bool = True
    chunk: int | None = None
    carrier: str | None = None
    adds: str | None = None
    wire: str | None = None
    ordered: bool = True
    where: Location | None = None
    axis: int = 0
    local: str | None = None
    group: int | None = None
    blocks: int | None = None
    chunks: int | None = None
    slices: int | None = None
    why: str = ""
    in_order_s: float | None = None
    overlapped_s: float | None = None
    estimates: dict[tuple[str | None, int], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, what in (("chunk", " of rows"), ("chunks", ""), ("slices", "")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"Move({name}={value!r}): it is a positive number{what}", hint="leave it out")
        for name in ("group", "blocks"):
            value = getattr(self, name)
            rasterizes = self.local is not None or self.carrier in (QUEUE, COLLECTIVE)
            if value is not None and (not rasterizes or not isinstance(value, int) or value < 1):
                where = f"where local is {SOURCE!r} or carrier {QUEUE!r} or {COLLECTIVE!r}"
                raise UsageError(f"Move({name}={value!r}): a positive number, {where}", hint=f"leave {name} out")
        if self.slices is not None and self.local is None:
            raise UsageError(f"Move(slices={self.slices!r}): it takes local={SOURCE!r}", hint="leave slices out")
        if self.carrier not in (None, *CARRIERS):
            raise UsageError(
                f"Move(carrier={self.carrier!r}): it is one of {', '.join(CARRIERS)}", hint="leave it out"
            )
        if self.adds not in (None, *ADDS):
            raise UsageError(f"Move(adds={self.adds!r}): it is one of {', '.join(ADDS)}", hint="leave it out")

        if self.local not in (None, SOURCE):
            raise UsageError(f"Move(local={self.local!r}): it is {SOURCE!r}", hint="leave it out")
        if self.wire not in (None, *WIRES, ANY):
            raise UsageError(f"Move(wire={self.wire!r}): it is one of {', '.join((*WIRES, ANY))}", hint="leave it out")

    def __str__(self) -> str:
        line = f" (line {self.where.line})" if self.where else ""
        order = "tiles in transfer order" if self.ordered else "tiles in program order"
        pieces = f"{self.chunk} {'columns' if self.axis else 'rows'} at a time"
        pieces = pieces if self.slices is None else f"in {self.slices} slices of columns"
        rows = "" if self.chunk is None else f", {pieces}, {order}"
        rounded = "" if self.wire is None else f", as {self.wire}"
        how = f"overlapped{rows}{rounded}" if self.overlapped else "sequential"
        return f"{self.title}{line}: {how}: {self.why}{self._estimate()}"

    @property
    def title(self) -> str:
        """The data moved, its source and target."""
        source, target = self.tensors
        return f"{self.collective} {source} -> {target}"

    def _estimate(self) -> str:
        if self.in_order_s is None or self.overlapped_s is None:
            return ""
        return f"; estimated {format_time(self.overlapped_s)} overlapped, {format_time(self.in_order_s)} sequential"


@dataclass
class Schedule:
    """The collectives of a program in order, and what happens with each.

    Attributes:
        measured: measured times of this and other schedules, as text; "" where the cost model alone decided.
    """

    moves: list[Move] = field(default_factory=list)
    measured: str = ""

    def __str__(self) -> str:
        lines = [*map(str, self.moves), *([self.measured] if self.measured else [])]
        return "\n".join(lines) or "no collective of whole tensors"

    def _repr_html_(self) -> str:
        return preformatted(str(self))
