# SPDX-License-Identifier: MIT
"""`tilescale.compile` and `tilescale.jit`: TileLang's entries, with a machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tilelang_core import compile as stock
from tilelang_core import ir, jit_kernel
from tilescale.comm import Team
from tilescale.errors import UsageError, check_type
from tilescale.hda import Machine
from tilescale.hda.current import as_machine, use_machine
from tilescale.hda.names import BuiltIn
from tilescale.passes.overlap.schedule import Schedule
from tilescale.program.builder import ProgramBuilder
from tilescale.runtime.kernel import Kernel

Chooser = Callable[[Callable[[str | Schedule], Kernel]], Kernel]
"""A function that takes the binding of a program with a schedule, and returns the kernel of the schedule that it
chooses."""

SCHEDULES = ("overlap", "sequential", "persistent")
"""Order of phases: overlapped where legal and faster; sequential, which is always legal; or tasks of one launch."""


def compile(  # noqa: A001 - TileLang's name
    func: ir.PrimFunc | ProgramBuilder,
    out_idx: list[int] | int | None = None,
    execution_backend: str | None = None,
    target: Any = None,
    target_host: Any = None,
    verbose: bool | None = None,
    pass_configs: dict[str, Any] | None = None,
    compile_flags: list[str] | str | None = None,
    *,
    machine: Machine | BuiltIn | str | None = None,
    schedule: str | Schedule | Chooser = "overlap",
    wait_s: float | None = None,
    team: Team | None = None,
    timeline: bool = False,
) -> Kernel:
    """Bind a traced function to a machine.

    Args:
        func: a `@T.prim_func`; or a function of this package that traces it, with its arguments.
        machine: a machine, a built-in name or a path; None means the current one.
        schedule: "overlap": collectives of whole tensors, and copies around a ring, run concurrently with the grids
            that produce or consume their data, where that is proven legal and the cost model predicts a gain.
            "sequential": phases in program order. "persistent": all grids and collectives as tasks of one launch, which
            wait for each other tile by tile. Or an edited `Kernel.moves` of the same program. Or
            `tilescale.measured`, which measures the best few.
        wait_s: longest time in seconds that a wait for another device takes; None takes TILESCALE_WAIT_S (30 if unset).
        timeline: whether blocks on GPUs record when their waits and signals begin and end, for `Kernel.timeline`. This
            takes some time itself.
        team: the ranks whose devices it runs on, each of which calls it; None for all ranks of the job.
        out_idx: positions of parameters that a call allocates and returns.
        target: a compilation target as `tilelang.compile` takes it; None follows the machine.
        execution_backend, target_host, verbose, pass_configs, compile_flags: as for `tilelang.compile`; the emulator
            does not need them.

    Returns:
        The kernel; nothing is generated before it is called or its source is asked for.

    Raises:
        UnknownMachineError, MachineFileError: as `Machine.load`.
        UnsupportedError: `schedule="persistent"` of a program that cannot be one launch: why, and the line.
        UsageError: not a traced function, an unknown schedule or one of another program, a `wait_s` that is not
            positive, options of other types, a target that TileLang does not know, or a function traced for another
            machine that cannot be traced again.
    """
    if not (isinstance(schedule, Schedule) or callable(schedule) or schedule in SCHEDULES):
        raise UsageError(
            f"schedule={schedule!r}: supported: {', '.join(SCHEDULES)}, tilescale.measured, and a tilescale.Schedule",
            hint="leave schedule out",
        )
    _check_options(
        wait_s=wait_s, team=team, timeline=timeline, out_idx=out_idx, pass_configs=pass_configs,
        compile_flags=compile_flags,
    )  # fmt: skip
    if wait_s is not None and not (math.isfinite(wait_s) and wait_s > 0):
        raise UsageError(f"wait_s={wait_s}", hint="give a number of seconds above 0, or leave it out")
    _check_target(target)
    options = {
        "wait_s": wait_s,
        "team": team,
        "timeline": timeline,
        "out_idx": out_idx,
        "execution_backend": execution_backend,
        "target": target,
        "target_host": target_host,
        "verbose": verbose,
        "pass_configs": pass_configs,
        "compile_flags": compile_flags,
    }
    bind = functools.partial(Kernel, func, as_machine(machine), options)
    return schedule(bind) if callable(schedule) else bind(schedule)


_OPTIONS: dict[str, tuple[str, tuple[type, ...]]] = {
    "wait_s": ("a number of seconds", (int, float)),
    "team": ("a tilescale.comm.Team", (Team,)),
    "timeline": ("True or False", (bool,)),
    "out_idx": ("a position, or a list of them", (int, list, tuple)),
    "pass_configs": ("a dictionary of TileLang's pass settings", (dict,)),
    "compile_flags": ("a flag, or a list of them", (str, list, tuple)),
}


def _check_options(**given: Any) -> None:
    """Raises UsageError for an option of another type."""
    for name, value in given.items():
        if value is not None:
            check_type(name, value, _OPTIONS[name][0], *_OPTIONS[name][1])
    for position in given["out_idx"] if isinstance(given["out_idx"], list | tuple) else ():
        check_type("out_idx", position, "positions of parameters", int)


def _check_target(target: Any) -> None:
    """Raises UsageError for a target that TileLang does not know."""
    problem = jit_kernel.wrong_target(target)
    if problem is not None:
        raise UsageError(f"target={target!r}: {problem}", hint='leave it out, or {"kind": "cuda", "arch": "sm_90a"}')


def jit(
    function: Callable | None = None,
    *,
    machine: Machine | BuiltIn | str | None = None,
    schedule: str | Schedule | Chooser = "overlap",
    wait_s: float | None = None,
    **options: Any,
) -> Any:
    """`tilelang.jit` for whole machines: a factory of kernels, or a kernel in eager style.

    Args:
        function: returns a `@T.prim_func`, or is one in eager style.
        machine: the machine that it is traced and compiled for; None means the current one at each call.
        schedule, wait_s, options: as for `tilescale.compile`; options are those of `tilelang.jit`.

    Returns:
        A factory that returns a `Kernel` (lazy style) or runs it at once (eager style), and that `tilelang.autotune`
        accepts.

    Raises:
        UnknownMachineError, MachineFileError, UsageError: when the factory is called, as for `tilescale.compile`.
    """

    def decorate(wrapped: Callable) -> Any:
        return stock.jit(
            wrapped,
            tracing=lambda: use_machine(as_machine(machine)),
            finish=lambda func, given: compile(
                func, **{"machine": machine, "schedule": schedule, "wait_s": wait_s, **given}
            ),
            no_outputs=_no_outputs,
            **options,
        )

    if function is not None:
        check_type("function", function, "a function that returns a @T.prim_func, or is one in eager style", Callable)
    return decorate if function is None else decorate(function)


def _no_outputs(out_idx: Any) -> UsageError:
    return UsageError(
        f"out_idx={out_idx} of a function in eager style, which has no parameters yet when it is decorated",
        hint="leave out_idx out; make each output by T.empty(shape, dtype) in the function and return it",
    )
