# SPDX-License-Identifier: MIT
"""A machine: a description, and every question that the rest of TileScale asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

from tilescale.hda import query, route
from tilescale.hda.description import Description
from tilescale.hda.model import Network
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
        """A notebook's view of it."""
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

    # -- counts, capacity, rates (query.py) ----------------------------------------------------------------------------

    def count(self, level: str, within: str | None = None) -> int:
        """Units of `level` in one unit of `within`, or in the whole machine; clusters count at their maximum size."""
        return query.count(self, level, within)

    def capacity(self, layer: str, threads: int | None = None) -> int:
        """Bytes of a layer that one tile may take at most; less where a program of `threads` threads reaches less."""
        return query.capacity(self.layer(layer), threads)

    def residency(
        self, *, threads: int, shared_bytes: int = 0, registers_per_thread: int = 0, fragment_bytes: int = 0
    ) -> int:
        """Number of programs of a size that one physical program unit runs at once; 0 if not even one fits.

        Args:
            threads: of one program.
            shared_bytes: bytes that one program takes of the layer of scope "shared".
            registers_per_thread: 32-bit registers of one thread, or else
            fragment_bytes: bytes that one program's fragments take of the layer of scope "fragment".
        """
        return query.residency(self, threads, shared_bytes, registers_per_thread, fragment_bytes)

    def rate(self, level: str, unit: str, dtype: str, *, sustained: bool = False) -> float:
        """Operations/s of one unit of `level`, e.g. rate("device", "tensor", "float16").

        Args:
            level: a program, cluster or unit level.
            unit: kind of arithmetic, as the description names it.
            dtype: data type, as TileLang names it.
            sustained: what well-tuned programs reach instead of the peak.

        Raises:
            UnsupportedError: the level has no such arithmetic or not for that data type; lists the available one.
        """
        return query.rate(self, level, unit, dtype, sustained)

    def rates(self, level: str) -> dict[str, dict[str, float]]:
        """Peak operations/s of one unit of `level`: kind of arithmetic -> data type -> rate."""
        return query.rates(self, level)

    def has(self, capability: str, level: str | None = None) -> bool:
        """Whether the machine, or `level` and the networks of its units, lists a capability."""
        return query.has(self, capability, level)

    # -- networks (route.py) --------------------------------------------------------------------------------------

    def network(self, level: str, within: str | None = None) -> Network | None:
        """The best network between units of `level`, linking all in one unit of `within` if given; or None."""
        return query.network(self, level, within)

    def connects(self, level: str, within: str | None = None) -> bool:
        """Whether networks link all units of `level` within one unit of `within`, or in the whole machine."""
        return query.connects(self, level, within)

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
