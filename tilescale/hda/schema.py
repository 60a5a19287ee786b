# SPDX-License-Identifier: MIT
"""Allowed values of the fields of a machine description.

The dataclasses of `model.py` are the schema: a field made with `spec` is a key of the description with the same
name, required where it has no default. The loader and the tables in `docs/machines.md` both read it from there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tilescale.hda import units

MOST = 1 << 24
"""The largest number in a description; some counts become tables or nodes of a graph."""

EXPECTED = {
    "text": "text",
    "integer": f"a whole number from 1 to {MOST}",
    "boolean": "true or false",
    "fraction": "a number above 0 and at most 1",
    "level": "the name of a level of this machine",
    "layer": "the name of a memory layer of this machine",
    "names": "a list of names",
    "choice": "one of",
    "choices": "a list of",
    "integers": f"a list of whole numbers from 1 to {MOST}",
    "pair": "a list of two unit numbers from 0",
    "rates": 'data types with their rate, such as "float16: 989 TFLOP/s"',
    "share": 'a bandwidth such as "361 GB/s", or a share of the network\'s such as "80 %"',
    "section": "a section",
    "named": "named sections",
    "list": "a list of sections",
    **{kind: f"a {kind} with its unit such as {example}" for kind, example in units.EXAMPLES.items()},
}
"""Description of each kind of field."""

_REQUIRED = object()


def spec(kind: str, doc: str, *, default: Any = _REQUIRED, of: type | None = None, among: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is read from a description.

    Args:
        kind: a key of `EXPECTED`.
        doc: one line for the reader of a description.
        default: the value where the description leaves the field out; without one it is required.
        of: the dataclass of the entries, for kinds "section", "named" and "list".
        among: the values allowed, for kinds "choice" and "choices".
    """
    assert kind in EXPECTED, kind
    metadata = {"kind": kind, "doc": doc, "of": of, "among": among}
    if default is _REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def of(section: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of `section` that a description may have, by name, in order."""
    return {field.name: field for field in dataclasses.fields(section) if "kind" in field.metadata}


def required(field: dataclasses.Field[Any]) -> bool:
    """Whether a description must have this field."""
    return field.default is dataclasses.MISSING


def describe(field: dataclasses.Field[Any]) -> str:
    """The allowed values of a field, in words: EXPECTED with the choices."""
    text = EXPECTED[field.metadata["kind"]]
    among = field.metadata["among"]
    return f"{text} {', '.join(among)}" if among else text


def table(section: type) -> str:
    """The fields of `section` as a Markdown table: field, allowed values, meaning."""
    lines = ["| field | holds | meaning |", "|---|---|---|"]
    for name, field in of(section).items():
        mark = " *" if required(field) else ""
        lines.append(f"| `{name}`{mark} | {describe(field)} | {field.metadata['doc']} |")
    return "\n".join(lines)
