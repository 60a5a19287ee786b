# SPDX-License-Identifier: MIT
"""A machine: a description that can be loaded or detected, with the routes between its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

from tilescale.hda import route
from tilescale.hda.description import Description
from tilescale.hda.names import BuiltIn


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Machine(Description):
    """A hierarchical machine, read from a description and frozen. Equal and hashed by content.

    Attributes:
        levels: finest first. Their names are the description's.
        memory: layers, finest first.
        networks: what connects units of one level.
        capabilities: features of the machine as a whole.
    """

    def __repr__(self) -> str:
        return f"Machine({self.name!r})"

    def _repr_html_(self) -> str:
        from tilescale.hda.draw.svg import picture

        return picture(self)

    # -- loading --------------------------------------------------------------------------------------------------

    @staticmethod
    def load(name_or_path: BuiltIn | str | PathLike[str]) -> Machine:
        """The machine of that name, or of a description file.

        Raises:
            UnknownMachineError: neither a built-in name nor a file; lists the built-in ones.
            MachineFileError: a description that does not follow the schema.
        """
        from tilescale.hda.load import load

        return load(name_or_path)

    @staticmethod
    def detect() -> Machine:
        """The machine this process runs on: its GPUs if there are any that a description knows, else its CPUs."""
        from tilescale.hda.detect import detect

        return detect()

    @staticmethod
    def names() -> tuple[str, ...]:
        """The built-in machines, sorted."""
        from tilescale.hda.load import names

        return names()

    def path(self, level: str, a: int, b: int, *, sizes: Mapping[str, int | Sequence[int]] | None = None) -> route.Path:
        """The best route between units `a` and `b` of `level`.

        Args:
            level: whose units they are.
            a, b: unit numbers over the whole machine, row-major, the coarsest level slowest.
            sizes: what a launch uses where that is not all: units of a level in one unit of the next coarser level
                that is launched. A tuple for the program level lays the programs out on a mesh, slowest first.

        Raises:
            NoPathError: nothing connects them.
            PeerOutOfRangeError: there is no such unit.
        """
        return route.path(self, level, a, b, sizes or {})
