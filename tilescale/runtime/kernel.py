# SPDX-License-Identifier: MIT
"""A program bound to a machine: call it with tensors, look at its source."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import escape
from operator import itemgetter
from os import PathLike
from typing import Any

import torch

from tilelang_core import ir
from tilelang_core.ir import PrimFunc
from tilescale import backends
from tilescale.comm import Team, init
from tilescale.comm.agreement import Facts, agree
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.refusal import refuse
from tilescale.comm.team import run_in_call
from tilescale.errors import ArgumentError, LaunchError, UnsupportedError, UsageError
from tilescale.hda.units import format_count
from tilescale.passes.mod_analysis import written_parameters
from tilescale.passes.overlap.schedule import Schedule
from tilescale.passes.structure import name_of, structure
from tilescale.program.arguments import check_device, check_present, check_writable, count_writes, readable, scalar
from tilescale.program.builder import ProgramBuilder
from tilescale.program.pointers import follows_addresses
from tilescale.program.preformatted import preformatted
from tilescale.program.source import source_of
from tilescale.runtime import early
from tilescale.runtime.ahead import noted
from tilescale.runtime.bound_program import BoundProgram
from tilescale.runtime.outputs import KernelOutputs, output_positions, place_arguments
from tilescale.runtime.placement import local_tensor, reached_by_peers, warn_of_plain_tensors
from tilescale.runtime.schedule_text import describe
from tilescale.timing.draw.trace import written
from tilescale.timing.timeline import Timeline


class DisplayedText(str):
    """A string that prompts and notebooks show as its lines, not quoted with "\\n" between them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Kernel(BoundProgram):
    """A compiled program.

    Call it with this rank's tensors: every rank of the job calls it with its own (SPMD), a view's shards where the
    program splits a tensor over devices. On a computer without GPUs the call is a collective: the arguments are
    gathered at one rank, the machine is emulated there, and written tensors are sent back. A program without a level
    above its grid runs on each rank separately. A DTensor is passed as its shard, if its placement matches the
    program's view.

    Attributes:
        machine: the machine that it is compiled for.
        report: the report of the last emulated call, on the rank that emulated; None elsewhere.
    """

    def __init__(self, *bound: Any):
        """Bind a program, as `BoundProgram`."""
        super().__init__(*bound)
        self.report: Any = None
        # Of tensors that GPUs need in symmetric memory; operators, which have builders, allocate theirs.
        self._has_warned = isinstance(self._traced, ProgramBuilder)
        self._call: Callable[..., Any] = self._first_call  # then the function that the first call chooses

    def __repr__(self) -> str:
        return f"<tilescale.Kernel {name_of(self._written)} for {self.machine.name}>"

    def _repr_html_(self) -> str:
        return f"<b>{escape(self.program.name)}</b>{preformatted(self.schedule)}"

    @property
    def ir(self) -> PrimFunc:
        """The traced TIR, rewritten by a schedule other than "sequential"."""
        return self._scheduled[0]

    @property
    def prim_func(self) -> PrimFunc:
        """`ir`, under TileLang's name."""
        return self.ir

    @property
    def moves(self) -> Schedule | None:
        """Schedule of the collectives of whole tensors, with reasons; None with a named schedule but "overlap"."""
        found = self._scheduled[1]
        return found if isinstance(found, Schedule) else None

    @property
    def source(self) -> str:  # type: ignore[override]
        """The CUDA text.

        Raises:
            UnsupportedError: an operation without a CUDA lowering, or a machine without a CUDA target.
            ShapeError: a GEMM that cannot be distributed over the threads of its unit.
            InternalError: TileScale itself failed; please report it.
        """
        return DisplayedText(self._lowered(backends.generator(self.machine)).source(self.options))

    @property
    def python(self) -> str:
        """The program as Python source in our language, with its collectives overlapped as scheduled.

        Executed, it defines the program again, under its name.

        Raises:
            UnsupportedError: the program has a construct without source form.
        """
        return DisplayedText(source_of(structure(self.ir, self.machine), self.machine))

    @property
    def schedule(self) -> str:
        """The order of execution as text: launches, phases, operations; implementations, and the reasons for them."""
        try:
            chosen = self._lowered(backends.generator(self.machine)).notes
        except UnsupportedError:
            chosen = ()
        return DisplayedText(describe(self.program, self.machine, chosen, self._scheduled[1]))

    @property
    def device(self) -> str:
        """The device that its tensors must be on, as `torch.Tensor.to` takes it: "cpu" or "cuda".

        Raises:
            UnsupportedError: nothing here runs the program.
        """
        return self._place.type

    def synchronize(self) -> None:
        """Wait until all calls until now have ended on this rank's device; a call by itself only queues them.

        Results are right once this returns. A rank that dies meanwhile ends the wait at once.

        Raises:
            WaitTimeoutError: a wait for another device ran out of time (`wait_s`): the flag, its line, and the value
                seen.
            OutOfBoundsError: a wait or signal names a flag outside of its tensor.
            RankMismatchError: ranks call different programs, in different orders or with different tensors.
            RankFailedError: another rank of the job failed.
        """
        self._executable.synchronize()

    def timeline(self, path: str | PathLike[str] | None = None) -> Timeline:
        """The waits and signals of each block, in the last launch on this rank's GPU, and what it did in between.

        Needs `timeline=True`. A path gets a trace for Perfetto. Raises as `synchronize`, and a UsageError without one.
        """
        made = self._executable.timeline
        if made is None or not self.program.moments:
            raise UsageError("no timeline was recorded", hint="compile with timeline=True, and run it on GPUs")
        return written(made(), path)

    def reset(self) -> None:
        """Collective: make the kernel run again after an error that `synchronize` or a later call raised.

        Zeroes the kernel's state between calls, on all ranks. Flags among its arguments are the caller's.

        Raises:
            RankFailedError: another rank failed, or does not come within the job's timeout.
            RankMismatchError: ranks reset different kernels.
            DeviceError: something else keeps the device busy.
        """
        self._executable.reset()

    @cached_property
    def _executable(self) -> backends.Executable:  # type: ignore[override]
        return self.lower().build(self.options)

    def prepare(self) -> None:
        """Collective: what its first call does before it runs: compile, load, open memory. Raises as that call."""
        self._executable  # noqa: B018 - made once

    @cached_property
    def _place(self) -> torch.device:
        return torch.device(self._executable.device)

    @cached_property
    def _outputs(self) -> KernelOutputs:  # type: ignore[override]
        positions = output_positions(self.program, self.options.get("out_idx"))
        return KernelOutputs(self.program, positions, self._executable.device)

    @cached_property
    def _changed(self) -> frozenset[int]:
        return written_parameters(self.program) | set(self._outputs.positions)

    @cached_property
    def _facts(self) -> Facts:
        return Facts(self.program.name, ir.fingerprint(self.ir), (self.machine.name, self.machine.digest))

    def __call__(self, *args: Any) -> Any:
        """Run on this rank's arguments, in place; returns what `out_idx` or `T.empty` declare as outputs.

        Raises:
            ArgumentError: arguments that do not fit the program.
            LaunchError: the job has another number of ranks than the program's devices.
            RankMismatchError: ranks call different programs.
            RankFailedError: another rank of the job failed, or did not come to this call.
            UsageError: a program over ranks is called while another thread of this rank is in such a call.
            WaitTimeoutError: on GPUs, a wait of an earlier call ran out of time.
            UntrustedCacheError: on GPUs, other users can write to the cache of compiled kernels.
            DeadlockError, OutOfBoundsError, ...: as `tilescale.emulate`, on every rank.

        After an error the values of the tensors that the program writes are undefined, on every rank.
        """
        try:
            return self._call(*args)
        except (Exception, KeyboardInterrupt) as error:
            refuse(self.__dict__.get("_team"), self.program.name, error)
            raise

    def _first_call(self, *args: Any) -> Any:
        if noted(self, args):
            return None
        with self._team.one_call:  # making the program is a part of the call
            early.finish(self, self._team)
            self._call = self._chosen()
        return self._call(*args)

    def _chosen(self) -> Callable[..., Any]:
        executable = self._executable
        if executable.direct is not None:
            return executable.direct
        if executable.gathers:
            return self._on_emulator
        return self._on_device if self._outputs.positions else self._again()

    def _on_device(self, *args: Any) -> Any:
        with self._team.one_call:
            self._ranks  # noqa: B018 - raises if the job does not fit the program
            values = self._outputs.allocate(self._given(args))
            self._executable.run([values])
        count_writes(values[i] for i in self._changed)
        return self._outputs.returned(values)

    def _again(self) -> Callable[..., None]:
        """A function that repeats the previous call without lookups, if the call is the same."""
        one_call, again, first = self._team.one_call, self._executable.again, self._on_device
        numbers = [(i, p) for i, p in enumerate(self.program.parameters) if p.buffer is None]
        changed = itemgetter(*self._changed) if self._changed else lambda args: ()
        count = torch.autograd.graph.increment_version

        def call(*args: Any) -> None:
            for i, parameter in numbers:
                if i < len(args):
                    scalar(parameter, args[i])
            with one_call:
                is_known = again(args)
            if is_known:
                count(changed(args))
            else:
                first(*args)

        return call

    def _on_emulator(self, *args: Any) -> Any:
        if self._ranks == 1:
            (values,) = self._emulate([self._given(args)])
        else:
            values = self._gather_and_emulate(args)
        return self._outputs.returned(values)

    def _given(self, args: Sequence[Any]) -> list[Any]:
        """This rank's part of the arguments, None for outputs, after all that can be said of them on the host."""
        values = place_arguments(self.program, self._outputs.positions, args)
        check_present(self.program, values, self._outputs.positions)
        for i, parameter in enumerate(self.program.parameters):
            if i in self._outputs.positions:
                continue
            if parameter.buffer is None:
                values[i] = scalar(parameter, values[i])
                continue
            value = local_tensor(self.program, parameter, values[i])
            check_device(parameter, value, self._place)
            if i in self._changed:
                check_writable(parameter, value)
            values[i] = readable(value)
        return values

    @cached_property
    def _ranks(self) -> int:
        """Number of ranks of one launch. Raises LaunchError if the job has another number."""
        ranks = self._team.size if self._spans_units else 1
        self._check_ranks(ranks)
        return ranks

    @cached_property
    def _team(self) -> Team:
        return (self.options.get("team") or init()) if self._spans_units else Team(ranks=(0,), rank=0)

    @property
    def _spans_units(self) -> bool:
        """Whether the ranks of a job are the units of one launch, and not separate launches."""
        return bool(self.program.extents) or self.machine.program_level == self.machine.tensor_level

    def _emulate(self, per_unit: list[list[Any]]) -> list[list[Any]]:
        """Run the units that this process drives; returns the arguments of each, with its outputs."""
        complete = [self._outputs.allocate(values) for values in per_unit]
        self.report = self._executable.run(complete)
        return complete

    def _gather_and_emulate(self, args: Sequence[Any]) -> list[Any]:
        """Gather the arguments at rank 0 and emulate; an invalid argument of one rank is an error on all."""
        if self._team.size > 1 and follows_addresses(self.program):
            raise UnsupportedError(
                f"{self.program.name!r} makes tensors of addresses, and ranks without GPUs are emulated in one process",
                hint="emulate all ranks in one process: tilescale.emulate(func, one list of tensors per unit)",
                where=self.program.launches[0].where,
            )
        error: ArgumentError | None = None
        values: list[Any] = []
        try:
            values = self._given(args)
            self._warn_of_plain_tensors(values)
        except ArgumentError as found:
            error = found

        def at_root(payloads: list[Any]) -> list[Any]:
            if any(facts != self._facts for facts, _, _ in payloads):
                return [None] * len(payloads)
            for _, error, _ in payloads:
                if error is not None:
                    raise error
            with _unchanged_by_failure([values[i] for i in self._changed]):
                complete = self._emulate([v for _, _, v in payloads])
            return [{i: unit[i] for i in self._changed} for unit in complete]

        results = run_in_call(self._team, "kernel", (self._facts, error, values), at_root)
        if results is None:
            agree(HeapGroup(self._team), self._facts, self.ir.script)
        for i, result in results.items():
            values[i] = _stored(values[i], result)
        return values

    def _warn_of_plain_tensors(self, values: Sequence[Any]) -> None:
        """Say once which tensors GPUs need in symmetric memory: the emulator reaches all."""
        if self._team.size > 1 and not self._has_warned:
            self._has_warned = True
            given = [i for i in reached_by_peers(self.program) if i not in self._outputs.positions]
            warn_of_plain_tensors(self.program, given, values)

    def _check_ranks(self, ranks: int) -> None:
        extents = [extent for _, extent in self.program.extents]
        if self.machine.program_level == self.machine.tensor_level:
            extents += self.program.launches[0].grid
        known = [ir.constant(extent) for extent in extents]
        units = math.prod(n for n in known if n is not None)
        if ranks % units if None in known else ranks != units:
            levels = ", ".join(f"{name}={extent}" for name, extent in self.program.extents)
            who = "the job has" if self.options.get("team") is None else "its team has"
            raise LaunchError(
                f"{self.program.name!r} launches {format_count(units, self.machine.tensor_level.name)}"
                f"{f' ({levels})' if levels else ''}, {who} {format_count(ranks, 'rank')}",
                hint=f"start it with `tilescale run -n {units} ...`, or emulate all of them in one process with "
                "tilescale.emulate(func, one list of tensors per unit)",
                where=self.program.launches[0].where,
            )


@contextlib.contextmanager
def _unchanged_by_failure(given: Sequence[Any]) -> Iterator[None]:
    """Restore tensors after a failure: other ranks sent copies of theirs."""
    before = [(value, value.clone()) for value in given if isinstance(value, torch.Tensor)]
    try:
        yield
    except Exception:
        for value, held in before:
            value.copy_(held)
        raise


def _stored(mine: Any, result: Any) -> Any:
    """This rank's tensor with the result in it; an output is the result itself."""
    if mine is None or mine is result:
        return result
    mine.detach().copy_(result)
    return mine
