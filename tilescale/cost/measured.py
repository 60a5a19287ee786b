# SPDX-License-Identifier: MIT
"""Measurements of a machine: typed points, read from and written to dated JSON files.

A file has one kind of point a list. Times are microseconds, rates 1e9 bytes/s; each is the median of the measurements,
on the slowest rank, with the smallest and the largest where they are known. `source` says where a point comes from,
where not all of a file's points have the origin that the file names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tilescale.cost.records import made, read
from tilescale.errors import UsageError

FORMAT = 1
"""Number of the files' form."""

VECTOR = 16
"""Bytes of a thread's widest access."""

IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives that move a part of the whole tensor for each unit."""

DATA = Path(__file__).with_name("data")
"""Folder of the measurements that are shipped."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTransfer:
    """A transfer between two units that own tensors.

    Attributes:
        mechanism: as the machine's description names it.
        operation: "put" or "get".
        nbytes: of a transfer; None for a large one whose size was not noted.
        programs: that moved it together; None for transfers that the host starts, and for as many as a unit runs at
            once.
    """

    mechanism: str
    operation: str
    gb_s: float
    nbytes: int | None = None
    programs: int | None = None
    spread: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredFlag:
    """Time from one unit's store of `nbytes` and a flag until another one has seen them."""

    nbytes: int
    us: float
    spread: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredLaunch:
    """Time of an empty grid. `mode`: "graph" for launches within a graph, "eager" for one by one."""

    mode: str
    us: float
    spread: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredGemm:
    """A GEMM of `shape` (M, N, K) on one unit that owns tensors; `by`: its implementation, e.g. "cublas"."""

    shape: tuple[int, int, int]
    dtype: str
    by: str
    us: float
    spread: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """A collective of whole tensors.

    Attributes:
        operation: as in the language.
        algorithm: as `impl=` takes it; another system's kernel has the system before it.
        units: that took part.
        nbytes: of the whole tensor: the result of an all-gather, the tensor of one unit elsewhere.
        mode: "graph" or "eager".
    """

    operation: str
    algorithm: str
    units: int
    nbytes: int
    us: float
    mode: str = "graph"
    dtype: str = "bfloat16"
    spread: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredContention:
    """A GEMM concurrent with copies of `mechanism`: its time with them through that without them."""

    mechanism: str
    shape: tuple[int, int, int]
    dtype: str
    ratio: float
    spread: tuple[float, float] | None = None
    source: str = ""


Point = TypeVar(
    "Point", MeasuredTransfer, MeasuredFlag, MeasuredLaunch, MeasuredGemm, MeasuredCollective, MeasuredContention
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a machine at one time.

    Attributes:
        machine: name of the description.
        gpu: the GPU's name; "" for simulated time.
        units: that took part.
        date: ISO, UTC.
        versions: of what ran.
        source: where the points come from.
        simulated: whether the times are the emulator's, and independent of the hardware.
    """

    machine: str
    date: str
    units: int
    gpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    simulated: bool = False
    wires: tuple[MeasuredTransfer, ...] = ()
    flags: tuple[MeasuredFlag, ...] = ()
    launches: tuple[MeasuredLaunch, ...] = ()
    products: tuple[MeasuredGemm, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    contention: tuple[MeasuredContention, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Measured:
        """The contents of a file. Raises UsageError: not readable, or of another form; which file, and where."""
        try:
            text = read(path)
            if text.pop("format", None) != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            return _measured(text)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} holds no measurements: {error}", hint="remove the file, or measure again: tilescale calibrate"
            ) from None

    @property
    def text(self) -> str:
        """The file's contents: JSON with a line for each point."""
        about = {"format": FORMAT, **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in KINDS}}
        parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
        for name in KINDS:
            lines = ",\n".join(f"  {json.dumps(_plain(point))}" for point in getattr(self, name))
            parts.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, kind) for kind in KINDS)

    def over(self, other: Measured) -> Measured:
        """These measurements, completed by the points of `other` that are not measured anew.

        Points of one curve, or that are compared with each other, all come from the same measurements.
        """
        joined: dict[str, Any] = {}
        for kind in KINDS:
            own = getattr(self, kind)
            known = {_curve(kind, point) for point in own}
            others = (point for point in getattr(other, kind) if _curve(kind, point) not in known)
            joined[kind] = (*own, *(replace(point, source=point.source or other.source) for point in others))
        return replace(self, **joined)

    def collective_s(
        self, operation: str, algorithm: str, units: int, nbytes: float, dtype: str = "bfloat16"
    ) -> float | None:
        """Seconds of a collective, between the sizes that were measured; None if it was not, or not at such sizes.

        A type that was not measured has the times of one that was. Between two sizes the time grows with the bytes, as
        by a start and a rate. Sizes with unaligned parts have a curve of their own, where such sizes were measured.
        """
        curve = self._curve(operation, algorithm, units, dtype, has_aligned_parts(operation, units, nbytes))
        if not curve or not curve[0][0] <= nbytes <= curve[-1][0]:
            return None
        place = next(i for i, (size, _) in enumerate(curve) if size >= nbytes)
        (size, us), (before, least) = curve[place], curve[max(place - 1, 0)]
        share = 1.0 if size == before else (nbytes - before) / (size - before)
        return (least + share * (us - least)) * 1e-6

    def _curve(self, operation: str, algorithm: str, units: int, dtype: str, aligned: bool) -> list[tuple[int, float]]:
        """Bytes and microseconds of a collective, growing: of sizes whose parts are aligned, or not, if any are."""
        asked = operation, algorithm, units, dtype, aligned
        if asked not in self._curves:
            like = operation, algorithm, units, "graph"
            points = [p for p in self.collectives if (p.operation, p.algorithm, p.units, p.mode) == like]
            types = {p.dtype for p in points}
            known = dtype if dtype in types else min(types, default=dtype)
            points = [p for p in points if p.dtype == known]
            alike = [p for p in points if has_aligned_parts(operation, units, p.nbytes) == aligned]
            self._curves[asked] = sorted((p.nbytes, p.us) for p in alike or points)
        return self._curves[asked]

    @cached_property
    def _curves(self) -> dict[tuple[str, str, int, str, bool], list[tuple[int, float]]]:
        """Curves that were asked for: choices ask for the same at each new size."""
        return {}


def has_aligned_parts(operation: str, units: int, nbytes: float) -> bool:
    """Whether all parts of a whole tensor begin at multiples of a vector: else they are moved element by element."""
    return operation not in IN_PARTS or nbytes % (VECTOR * units) == 0


KINDS: dict[str, type] = {
    "wires": MeasuredTransfer,
    "flags": MeasuredFlag,
    "launches": MeasuredLaunch,
    "products": MeasuredGemm,
    "collectives": MeasuredCollective,
    "contention": MeasuredContention,
}
"""Field of `Measured` -> the points in it."""

CURVES: dict[str, tuple[str, ...]] = {
    "wires": ("mechanism", "operation", "programs"),
    "flags": (),
    "launches": ("mode",),
    "products": ("dtype", "by"),
    "collectives": ("operation", "units", "mode", "dtype"),
    "contention": ("mechanism", "dtype"),
}
"""Field of `Measured` -> what points agree in that are fitted, interpolated or compared together."""


def _curve(kind: str, point: Any) -> tuple[Any, ...]:
    return tuple(getattr(point, name) for name in CURVES[kind])


def _measured(text: dict[str, Any]) -> Measured:
    for name, kind in KINDS.items():
        if not isinstance(text.get(name, []), list):
            raise ValueError(f"{name} is not a list")
        text[name] = [_point(kind, f"{name}[{i}]", entry) for i, entry in enumerate(text.get(name, ()))]
    return made(Measured, "the file", text)


def _point(kind: type[Point], where: str, entry: Any) -> Point:
    """Read a measured point. Raises ValueError for another form, and for numbers not above 0 but a flag's 0 bytes."""
    point = made(kind, where, entry)
    given = (value for name, value in vars(point).items() if (kind, name) != (MeasuredFlag, "nbytes"))
    numbers = [n for value in given for n in (value if isinstance(value, tuple) else (value,))]
    if not all(n > 0 for n in numbers if isinstance(n, int | float)):
        raise ValueError(f"{where} has no value above 0: {numbers}")
    return point


def _plain(point: Any) -> dict[str, Any]:
    """A point's fields, without empty ones."""
    return {key: value for key, value in asdict(point).items() if value not in (None, "")}
