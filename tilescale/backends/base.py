# SPDX-License-Identifier: MIT
"""Back ends as manifests: each lowers programs for a target. Shared code asks the manifest, never the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tilelang_core import ir
from tilescale.backends.services import DeviceServices
from tilescale.collectives import AvailableAlgorithms, CollectiveQuery
from tilescale.collectives.select import everything
from tilescale.errors import InternalError, TileScaleError, UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.program.operations import Collective
from tilescale.timing.timeline import Timeline


@dataclass(frozen=True)
class Target:
    """The target that a program is lowered for.

    Attributes:
        machine: its machine.
        sizes: units of each launched level above the grid, coarsest first; None where only the job determines the
            number.
    """

    machine: Machine
    sizes: tuple[tuple[str, int | None], ...]

    @classmethod
    def of(cls, program: Program, machine: Machine, units: int | None = None) -> Target:
        """The target of a program in a job of `units` tensor-owning units, or outside of a job."""
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
        gathers: whether one process runs all units of the job, so that it gathers their arguments.
        device: the device of its tensors, such as "cpu" or "cuda:1"; "cuda" for the current one.
        direct: replaces `run` where only the compiled kernel handles the arguments: it takes the caller's arguments and
            returns the caller's result. None if there is no such kernel.
        again: runs on arguments at the same addresses as those of an earlier `run`, without checking them; does nothing
            and returns False for others.
        synchronize: waits until every call has ended, and raises its error.
        reset: collective, makes it run again after a call that failed on the device.
        timeline: the last launch, as its blocks recorded it; None where they cannot.
        stock: TileLang's own kernel, if it has compiled the program.
        simulated_s: where calls are emulated, the simulated seconds of a call with arguments like these, which are not
            changed.
    """

    run: Callable[[list[list[Any]]], Any]
    gathers: bool
    device: str
    direct: Callable[..., Any] | None = None
    again: Callable[[tuple[Any, ...]], bool] = lambda values: False
    synchronize: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None
    timeline: Callable[[], Timeline] | None = None
    stock: Any = None
    simulated_s: Callable[[list[Any]], float] | None = None


class Compilation(Protocol):
    """A kernel to compile. Equal ones give the same kernel."""

    @property
    def length(self) -> int:
        """Relative duration, for the order."""

    @property
    def is_done(self) -> bool:
        """Whether the kernel is in a cache."""

    def pinned(self) -> Compilation:
        """The same compilation for a process that must not query the hardware."""

    def run(self) -> Any:
        """Compile the kernel into the cache."""


class Lowered(Protocol):
    """A program lowered by a back end for a target."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The implementations chosen for its operations, and the reasons."""

    def source(self, options: dict[str, Any]) -> str:
        """The generated text; options are those of `tilelang.compile`. Raises UnsupportedError: there is none for the
        machine or the back end."""

    def compilations(self, options: dict[str, Any]) -> Sequence[Compilation]:
        """The kernels that `build` compiles; then `build` finds them in a cache. Collective, as `build`."""

    def ahead(self, options: dict[str, Any]) -> Sequence[Compilation]:
        """Kernels of `compilations` that a rank knows without the other ranks. Not collective."""

    def build(self, options: dict[str, Any]) -> Executable:
        """Make it run on this computer; options are those of `tilelang.compile`."""


class LoweredBefore(Lowered, Protocol):
    """A lowered program that was found in a cache."""

    @property
    def program(self) -> Program:
        """The program."""


@dataclass(frozen=True)
class Backend:
    """One back end.

    Attributes:
        name: its name in messages.
        available: whether this computer can run it now.
        lower: lowers a program, on any computer; raises UnsupportedError for unsupported programs.
        priority: the first available one that lowers a program, highest first, runs it.
        generates: whether it generates text.
        target: the compilation target of a machine, as `tilelang.compile` takes it. Raises UnsupportedError.
        collectives: its algorithms for a collective.
        check: raises errors of a program that every lowering for a machine has, and that the program can correct;
            returns the error of a program that the back end cannot lower, as far as it is known.
        find: a program lowered before, by the name of its builder, its machine and its number of units; None where the
            cache has none.
        done_file: the file that says that all kernels of some work for a machine are in the caches, by a name for that
            work; None without caches.
        pin: queries the hardware for what compilations in forked processes need, which must not; None where nothing is
            compiled.
        services: loads its functions on devices; None where it has no devices.
        simulated_us: simulated microseconds of a program without data, by the arguments of `tilescale.emulate`; None
            where times are not simulated.
    """

    name: str
    available: Callable[[], bool]
    lower: Callable[[Program, Target], Lowered]
    priority: int
    generates: bool = False
    target: Callable[[Machine], Any] = lambda machine: None
    collectives: Callable[[Collective, CollectiveQuery, Target], AvailableAlgorithms] = lambda made, wanted, target: (
        everything(target.machine, wanted)
    )
    check: Callable[[Program, Machine], TileScaleError | None] = lambda program, machine: None
    find: Callable[[str, Machine, int | None], LoweredBefore | None] = lambda builder, machine, units: None
    done_file: Callable[[str, Machine], Path | None] = lambda work, machine: None
    pin: Callable[[], None] | None = None
    services: Callable[[], DeviceServices] | None = None
    simulated_us: Callable[..., float] | None = None

    def supports(self, machine: Machine) -> bool:
        """Whether it generates text for a machine."""
        try:
            return self.target(machine) is not None
        except UnsupportedError:
            return False


_BACKENDS: list[Backend] = []


def register(backend: Backend) -> None:
    """Add a back end; a second one of the same name is an error."""
    if any(b.name == backend.name for b in _BACKENDS):
        raise ValueError(f"back end {backend.name} is registered twice")
    _BACKENDS.append(backend)
    _BACKENDS.sort(key=lambda b: -b.priority)


def generator(machine: Machine) -> Backend:
    """The back end that generates text for a machine, whether or not it runs on this computer. Where there is none, the
    first that generates any, whose error has the reason."""
    able = [b for b in _BACKENDS if b.generates]
    return next((b for b in able if b.supports(machine)), able[0])


def available(made: Collective, wanted: CollectiveQuery, target: Target) -> AvailableAlgorithms:
    """The algorithms for a collective of a program: those of the back end that generates text for the machine; all
    known ones where no back end does, or where it has none.

    All back ends choose among the same algorithms, so that a program behaves the same on each.
    """
    found = (b.collectives(made, wanted, target) for b in _BACKENDS if b.supports(target.machine))
    return next((each for each in found if each.names), everything(target.machine, wanted))


def check(program: Program, machine: Machine) -> TileScaleError | None:
    """Check a program by the back ends that generate text for a machine, on any computer. Raises their errors; returns
    the first one of a lowering that is not supported, as `Backend.check`."""
    found = [backend.check(program, machine) for backend in _BACKENDS if backend.supports(machine)]
    return next((error for error in found if error is not None), None)


def find(builder: str, machine: Machine, units: int | None) -> LoweredBefore | None:
    """A program as the back end that runs programs on this computer has lowered it before, as `Backend.find`."""
    return next(b for b in _BACKENDS if b.available()).find(builder, machine, units)


def done_file(work: str, machine: Machine) -> Path | None:
    """As `Backend.done_file`, of the back end that runs programs on this computer."""
    return next(b for b in _BACKENDS if b.available()).done_file(work, machine)


def compiles() -> bool:
    """Whether a back end compiles programs on this computer; if so, forked processes can do it from now on."""
    able = [backend.pin for backend in _BACKENDS if backend.pin is not None and backend.available()]
    for pin in able:
        pin()
    return bool(able)


@cache
def device_services() -> DeviceServices:
    """The functions on devices of the first back end that has devices, whether or not this computer has any."""
    return next(b.services for b in _BACKENDS if b.services is not None)()


def simulated_us(
    func: ir.PrimFunc, args: Sequence[Any] | None = None, *, machine: Machine, assume: Mapping[str, Any] | None = None
) -> float:
    """Simulated microseconds of a program without data. Arguments and errors as of `tilescale.emulate`."""
    simulate = next(b.simulated_us for b in _BACKENDS if b.simulated_us is not None)
    return simulate(func, args, machine=machine, assume=assume)


def text_target(machine: Machine) -> Any | None:
    """The compilation target of a machine's text, as `Backend.target`; None where no back end generates any."""
    found = generator(machine)
    return found.target(machine) if found.supports(machine) else None


def choose(program: Program, lower: Callable[[Backend], Lowered]) -> Lowered:
    """The program, lowered by the back end that runs it on this computer.

    Args:
        lower: lowers the program by a back end, as `Backend.lower`.

    Raises:
        UnsupportedError: no back end runs it; the text has the reason of each.
        InternalError: an available back end failed. The next one would hide the fault.
    """
    reasons = []
    for backend in _BACKENDS:
        if not backend.available():
            reasons.append(f"{backend.name}: not available on this computer")
            continue
        try:
            return lower(backend)
        except InternalError:
            raise
        except TileScaleError as error:
            where = f" ({error.where[0].file}:{error.where[0].line})" if error.where else ""
            reasons.append(f"{backend.name}: {error.message}{where}")
    raise UnsupportedError(f"no back end runs {program.name!r}: {'; '.join(reasons)}")
