# SPDX-License-Identifier: MIT
"""A machine description as a tree that knows its lines, with what it `extends` merged in.

Every entry keeps the file and line it came from, so that an error in an inherited field points to the inherited file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tilescale.errors import Location, MachineFileError


@dataclass(frozen=True)
class DocumentEntry:
    """A value of a description: a scalar, a list of entries or a mapping of names to entries.

    `path` is the field in the user's notation, e.g. "memory.l1.capacity".
    """

    value: Any
    file: str
    line: int
    path: str = ""

    @staticmethod
    def of(value: object, file: str, path: str = "") -> DocumentEntry:
        """The entry of a plain value, as if it had been read from a file."""
        if isinstance(value, Mapping):
            value = {
                key: DocumentEntry.of(below, file, f"{path}.{key}" if path else key) for key, below in value.items()
            }
        elif isinstance(value, list):
            value = [DocumentEntry.of(below, file, f"{path}[{i}]") for i, below in enumerate(value)]
        return DocumentEntry(value, file, 1, path)

    def problem(self, message: str, hint: str | None = None) -> MachineFileError:
        """Make an error with `message`, located at this entry."""
        name = self.path or "description"
        return MachineFileError(f"{name}: {message}", hint=hint, where=Location(self.file, self.line, name))

    def find(self, path: str) -> DocumentEntry:
        """The entry at "a.b.c" below this one, or its deepest ancestor that exists."""
        here = self
        for key in path.split("."):
            if not isinstance(here.value, dict) or key not in here.value:
                break
            here = here.value[key]
        return here


BUILT_IN = Path(__file__).parent / "machines"

_LOADER_OF_OWN = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads our descriptions in a tenth of the time: 20 ms of the first step of a process. Other files may have sections
inside sections without an end, which no limit of Python bounds in C."""

MOST_ENTRIES = 100_000
"""Limit of entries of one file, with repetitions by aliases counted each time."""

MOST_CHARACTERS = 1 << 20
"""Limit of one file; the longest built-in description has a hundredth of it."""

LONGEST_NUMBER = 400
"""Limit of digits; Python neither reads nor prints integers of thousands."""


@dataclass
class _Reader:
    file: str
    loader: yaml.SafeLoader = field(default_factory=lambda: yaml.SafeLoader(""))
    entries: int = 0

    def entry(self, node: yaml.Node, line: int, path: str) -> DocumentEntry:
        """The entry of a node; `line` is that of its key. Raises MachineFileError: a key given twice, or more entries
        than `MOST_ENTRIES`."""
        self.entries += 1
        if self.entries > MOST_ENTRIES:
            raise DocumentEntry(None, self.file, line, path).problem(
                f"a description has at most {MOST_ENTRIES} entries", hint="aliases (*name) repeat what they stand for"
            )
        if isinstance(node, yaml.MappingNode):
            return DocumentEntry(self.mapping(node, path), self.file, line, path)
        if isinstance(node, yaml.SequenceNode):
            items = [self.entry(n, n.start_mark.line + 1, f"{path}[{i}]") for i, n in enumerate(node.value)]
            return DocumentEntry(items, self.file, line, path)
        if node.tag.endswith((":int", ":float")) and (":" in node.value or len(node.value) > LONGEST_NUMBER):
            return DocumentEntry(node.value, self.file, line, path)  # YAML 1.1 takes 1:30 for ninety
        try:
            return DocumentEntry(self.loader.construct_object(node), self.file, line, path)
        except ValueError as error:  # an invalid date
            raise DocumentEntry(None, self.file, line, path).problem(f"not readable: {error}") from None
        except (yaml.YAMLError, LookupError, AttributeError):  # a tag that the text does not fit
            kind = node.tag.rpartition(":")[2]
            raise DocumentEntry(None, self.file, line, path).problem(
                f"not readable as {kind}: {node.value!r}"
            ) from None

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, DocumentEntry]:
        """The entries of a mapping; raises MachineFileError for a key given twice."""
        found: dict[str, DocumentEntry] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            below = self.entry(value_node, line, f"{path}.{key}" if path else key)
            if key in found:
                raise below.problem(f"given twice, first in line {found[key].line}")
            found[key] = below
        return found


def _parse(path: Path) -> DocumentEntry:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise MachineFileError(
                f"a description has at most {MOST_CHARACTERS} characters",
                hint="see `tilescale machine list` for the built-in ones",
                where=Location(str(path), 1),
            )
        return _tree(text, str(path))
    except OSError as error:
        raise MachineFileError(f"{path} cannot be read: {error.strerror}", where=Location(str(path), 1)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Location(str(path), mark.line + 1 if mark else 1, "YAML")
        raise MachineFileError(f"not readable as YAML: {error.problem}", where=where) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MachineFileError(f"not readable as YAML: {error}", where=Location(str(path), 1)) from None
    except RecursionError:
        raise _too_deep(path) from None


@lru_cache(32)
def _tree(text: str, file: str) -> DocumentEntry:
    """The tree of a file with this text: each description that extends a built-in one reads that one's file."""
    is_own = Path(file).parent == BUILT_IN
    node = yaml.compose(text, Loader=_LOADER_OF_OWN if is_own else yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise DocumentEntry(None, file, 1).problem("expected a mapping with `levels`, `memory` and `networks`")
    return _Reader(file).entry(node, 1, "")


def _too_deep(path: Path) -> MachineFileError:
    return MachineFileError(
        "sections inside sections without an end",
        hint="an alias (*name) cannot be inside its own definition",
        where=Location(str(path), 1),
    )


def merge(base: DocumentEntry, over: DocumentEntry) -> DocumentEntry:
    """`over` where it has a value, `base` elsewhere; an empty value removes the base's."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        if entry.value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged[key], entry) if key in merged else entry
    return replace(over, value=merged)


def read(path: Path, locate: Callable[[str, Path], Path | None]) -> DocumentEntry:
    """The description at `path` with everything it extends. Raises MachineFileError: not YAML, not a mapping, a key
    given twice, or an `extends` of nothing or of itself.

    Args:
        path: the file.
        locate: gives the file that an `extends:` in a file of that folder means, or None.
    """
    return _read(path, locate, ())


def _read(path: Path, locate: Callable[[str, Path], Path | None], seen: tuple[Path, ...]) -> DocumentEntry:
    document = _parse(path)
    extends = document.value.get("extends")
    if extends is None:
        return document
    document = replace(document, value={key: below for key, below in document.value.items() if key != "extends"})
    base = locate(extends.value, path.parent) if isinstance(extends.value, str) else None
    if base is None:
        raise extends.problem("expected the name of a built-in machine or a file", hint="see `tilescale machine list`")
    if base.resolve() in (path.resolve(), *seen):
        raise extends.problem("a description cannot extend itself")
    return merge(_read(base, locate, (*seen, path.resolve())), document)
