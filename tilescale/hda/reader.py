# SPDX-License-Identifier: MIT
"""Reads the sections of a description into the dataclasses of the model, field by field as the schema says."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tilescale.errors import MachineFileError, did_you_mean
from tilescale.hda import schema, units
from tilescale.hda.document import DocumentEntry

Section = TypeVar("Section")


class Reader:
    """One reading of one description. Collects problems and continues, so that all of them are reported at once.

    Attributes:
        clock: Hz, what quantities per clock count at the moment.
        bandwidth: bytes/s, the current reference of shares.
        problems: the problems found, in the order of the file's schema.
    """

    def __init__(self, clock: float | None):
        self.clock = clock
        self.bandwidth: float | None = None
        self.problems: list[MachineFileError] = []

    def section(self, cls: type[Section], entry: DocumentEntry, **given: Any) -> Section:
        """An instance of `cls` from a mapping; invalid fields are set to None and listed in `problems`."""
        fields = schema.of(cls)
        below = self._below(entry, fields)
        outer = self.clock, self.bandwidth
        values: dict[str, Any] = dict(given)
        for name, field in fields.items():
            if name in below:
                values[name] = self._read(below[name], field)
            elif schema.required(field):
                self.problems.append(entry.problem(f"needs the field {name!r}: {schema.describe(field)}"))
                values[name] = None
            if name in ("clock", "bandwidth") and values.get(name):
                # Rates per clock refer to the clock of the same mapping, shares to the bandwidth of their network.
                setattr(self, name, values[name])
        self.clock, self.bandwidth = outer
        return cls(**values)

    def _below(self, entry: DocumentEntry, fields: Mapping[str, Any]) -> dict[str, DocumentEntry]:
        if not isinstance(entry.value, dict):
            self.problems.append(entry.problem(f"expected a section with {', '.join(fields)}, found {_show(entry)}"))
            return {}
        for name, below in entry.value.items():
            if name not in fields:
                hint = f"{did_you_mean(name, fields)}the fields here are {', '.join(fields)}"
                self.problems.append(below.problem("there is no such field", hint=hint))
        return {name: below for name, below in entry.value.items() if name in fields}

    def _read(self, entry: DocumentEntry, field: dataclasses.Field[Any]) -> Any:
        kind = field.metadata["kind"]
        read: Callable[[DocumentEntry, Mapping[str, Any]], Any] = getattr(self, f"_{kind}", self._quantity)
        try:
            return read(entry, field.metadata)
        except ValueError as error:
            text = str(error) or f"expected {schema.describe(field)}"
            self.problems.append(entry.problem(f"{text}, found {_show(entry)}"))
            return None

    # One method per kind of field that is not a quantity. A bare ValueError means "not what the schema describes".

    def _quantity(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> float:
        return units.parse(entry.value, metadata["kind"], self.clock)

    def _text(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> str:
        _expect(isinstance(entry.value, str | int | float) and not isinstance(entry.value, bool))
        return str(entry.value).strip()

    _level = _layer = _text

    def _integer(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> int:
        _expect(type(entry.value) is int and 0 < entry.value <= schema.MOST)
        return int(entry.value)

    def _boolean(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> bool:
        _expect(type(entry.value) is bool)
        return bool(entry.value)

    def _fraction(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> float:
        _expect(type(entry.value) in (int, float) and 0 < entry.value <= 1)
        return float(entry.value)

    def _choice(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> str:
        _expect(entry.value in metadata["among"])
        return str(entry.value)

    def _choices(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        names = self._names(entry, metadata)
        _expect(set(names) <= set(metadata["among"]))
        return names

    def _names(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        _expect(isinstance(entry.value, list) and all(isinstance(item.value, str) for item in entry.value))
        return tuple(item.value for item in entry.value)

    def _integers(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[int, ...]:
        _expect(isinstance(entry.value, list) and bool(entry.value))
        return tuple(self._integer(item, metadata) for item in entry.value)

    def _pair(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[int, int]:
        _expect(isinstance(entry.value, list) and [type(item.value) for item in entry.value] == [int, int])
        return entry.value[0].value, entry.value[1].value

    def _rates(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
        _expect(isinstance(entry.value, dict) and bool(entry.value))
        for dtype, item in entry.value.items():
            if not units.is_dtype(dtype):
                self.problems.append(item.problem("there is no such data type", hint=f"such as {units.DTYPES}"))
        return tuple((dtype, self._rate_of(item)) for dtype, item in entry.value.items())

    def _rate_of(self, entry: DocumentEntry) -> float:
        try:
            return units.parse(entry.value, "rate", self.clock)
        except ValueError as error:
            self.problems.append(entry.problem(f"{error}, found {_show(entry)}"))
            return 0.0

    def _share(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> float:
        text = entry.value
        if not isinstance(text, str) or not text.rstrip().endswith("%"):
            return units.parse(text, "bandwidth", self.clock)
        percent = float(text.rstrip().removesuffix("%"))
        _expect(0 < percent <= 100)
        return percent / 100 * (self.bandwidth or 0.0)

    def _section(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> Any:
        return self.section(metadata["of"], entry)

    def _named(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
        _expect(isinstance(entry.value, dict))
        return tuple(self.section(metadata["of"], below, name=name) for name, below in entry.value.items())

    def _list(self, entry: DocumentEntry, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
        _expect(isinstance(entry.value, list))
        return tuple(self.section(metadata["of"], below) for below in entry.value)


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError


def _show(entry: DocumentEntry) -> str:
    if isinstance(entry.value, dict):
        return "a section"
    if isinstance(entry.value, list):
        return f"[{', '.join(_show(item) for item in entry.value)}]"
    return "nothing" if entry.value is None else reprlib.repr(entry.value)
