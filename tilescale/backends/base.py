# SPDX-License-Identifier: MIT
"""Back ends as manifests: what each makes of a program. Shared code asks the manifest, never the name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilelang_core import ir
from tilescale.collectives import Available, Wanted
from tilescale.collectives.select import everything
from tilescale.errors import TileScaleError, UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.program.operations import Collective


@dataclass(frozen=True)
class Target:
    """What a program is lowered for.

    Attributes:
        machine: its machine.
        sizes: units of each launched level above the grid, coarsest first; None where only the job says how many.
    """

    machine: Machine
    sizes: tuple[tuple[str, int | None], ...]

    @classmethod
    def of(cls, program: Program, machine: Machine, units: int | None = None) -> Target:
        """The target of a program in a job of so many units that own tensors, or in no job."""
        known = [(name, ir.constant(extent)) for name, extent in program.extents]
        fixed = 1
        for _, size in known:
            fixed *= size or 1
        left_open = [name for name, size in known if size is None]
        if len(left_open) == 1 and units is not None and units % fixed == 0:
            known = [(name, units // fixed if size is None else size) for name, size in known]
        return cls(machine, tuple(known))


@dataclass(frozen=True)
class Executable:
    """A program ready to run.

    Attributes:
        run: takes, for each tensor-owning unit that this process drives, its list of arguments (changed in place).
        gathers: whether one process runs all units of the job, so that their arguments come to it.
        device: where it wants the tensors, such as "cpu" or "cuda:1"; "cuda" if on the current one.
        direct: stands for `run` where the arguments are nobody's affair but the compiled kernel's: it takes them as the
            caller passes them, and returns what the caller gets. None if there is no such kernel.
        again: runs on arguments at the same places as those of an earlier `run`, without looking at them once more;
            False, and nothing done, for others.
        synchronize: waits until every call has ended, and raises what went wrong in it.
        reset: collective, makes it run again after a call that failed on the device.
        stock: TileLang's own kernel, if it has compiled the program.
        simulated_s: where calls are emulated, the seconds that one takes on the machine if each unit passes arguments
            like these, which stay as they are.
    """

    run: Callable[[list[list[Any]]], Any]
    gathers: bool
    device: str
    direct: Callable[..., Any] | None = None
    again: Callable[[tuple[Any, ...]], bool] = lambda values: False
    synchronize: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None
    stock: Any = None
    simulated_s: Callable[[list[Any]], float] | None = None


class Compilation(Protocol):
    """A kernel to compile."""

    @property
    def is_done(self) -> bool:
        """Whether a cache has it."""

    def pinned(self) -> Compilation:
        """The same for a process that asks the computer nothing."""

    def run(self) -> Any:
        """Compile it into the cache."""


class Lowered(Protocol):
    """A program as a back end has it, for a target."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Which implementations were chosen for its operations, and why."""

    def source(self, options: dict[str, Any]) -> str:
        """The generated text; options are those of `tilelang.compile`.

        Raises:
            UnsupportedError: the machine, or the back end, has none.
        """

    def compilations(self, options: dict[str, Any]) -> Sequence[Compilation]:
        """What `build` compiles, and finds in a cache once it is done. Collective, as `build`."""

    def build(self, options: dict[str, Any]) -> Executable:
        """Make it run on this computer; options are those of `tilelang.compile`."""


@dataclass(frozen=True)
class Backend:
    """One back end.

    Attributes:
        name: what a person calls it.
        available: whether this computer can run it now.
        lower: makes of a program what it runs, on any computer; raises UnsupportedError for what it does not run.
        priority: the first available one that lowers a program, highest first, runs it.
        generates: whether it generates text.
        serves: whether it generates text for a machine.
        target: what its text for a machine is compiled for, as `tilelang.compile` takes it. Raises UnsupportedError.
        collectives: the algorithms that it has for a collective.
        check: raises what no lowering for a machine can make of a program, and the program can mend.
    """

    name: str
    available: Callable[[], bool]
    lower: Callable[[Program, Target], Lowered]
    priority: int
    generates: bool = False
    serves: Callable[[Machine], bool] = lambda machine: False
    target: Callable[[Machine], Any] = lambda machine: None
    collectives: Callable[[Collective, Wanted, Target], Available] = lambda made, wanted, target: everything(
        target.machine, wanted
    )
    check: Callable[[Program, Machine], None] = lambda program, machine: None


_BACKENDS: list[Backend] = []


def register(backend: Backend) -> None:
    """Add a back end; a second one of the same name is an error."""
    if any(b.name == backend.name for b in _BACKENDS):
        raise ValueError(f"back end {backend.name} is registered twice")
    _BACKENDS.append(backend)
    _BACKENDS.sort(key=lambda b: -b.priority)


def generator() -> Backend:
    """The first back end that generates text, whether or not it runs on this computer."""
    return next(b for b in _BACKENDS if b.generates)


def available(made: Collective, wanted: Wanted, target: Target) -> Available:
    """The algorithms for a collective of a program: those of the back end that generates text for the machine, all that
    there are where none does, or where it has none.

    Whoever runs the program chooses among the same, so that a program does on one what it does on the other.
    """
    found = (b.collectives(made, wanted, target) for b in _BACKENDS if b.serves(target.machine))
    return next((each for each in found if each.names), everything(target.machine, wanted))


def check(program: Program, machine: Machine) -> None:
    """What the back ends that generate text for a machine say of a program, wherever it runs. Raises what they say."""
    for backend in _BACKENDS:
        if backend.serves(machine):
            backend.check(program, machine)


def text_target(machine: Machine) -> Any | None:
    """What text for a machine is compiled for, as `Backend.target`; None where no back end generates any."""
    return next((backend.target(machine) for backend in _BACKENDS if backend.serves(machine)), None)


def choose(program: Program, lower: Callable[[Backend], Lowered]) -> Lowered:
    """The program as the back end has it that runs it on this computer.

    Args:
        lower: lowers the program by a back end, as `Backend.lower`.

    Raises:
        UnsupportedError: none does; says why each does not.
    """
    reasons = []
    for backend in _BACKENDS:
        if not backend.available():
            reasons.append(f"{backend.name}: not available on this computer")
            continue
        try:
            return lower(backend)
        except TileScaleError as error:
            where = f" ({error.where[0].file}:{error.where[0].line})" if error.where else ""
            reasons.append(f"{backend.name}: {error.message}{where}")
    raise UnsupportedError(f"no back end runs {program.name!r}: {'; '.join(reasons)}")
