# SPDX-License-Identifier: MIT
"""Agreement of ranks while a program is built: whether it is the same one, fits the devices, and compiles.

Every exchange is bounded, and an error of one rank is raised on all. Later calls exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tilelang_core import ir
from tilescale.backends.cuda.lowered_cache import source_digest
from tilescale.comm.agreement import Facts, agree, raise_any, sent
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.cost.calibrated import origin
from tilescale.hda import Machine
from tilescale.program.builder import builder_name
from tilescale.program.model import Program

T = TypeVar("T")


def once_per_node(group: HeapGroup, first: bool, make: Callable[[], T]) -> T:
    """Collective: the result of `make`; the first rank of each node finishes before the others start, which find it
    cached.

    Raises an error of `make` on any rank on all ranks.
    """
    call = CollectiveCall.here("kernel.compile")
    made: tuple[T | None, BaseException | None] = (None, None)
    for goes_first in (True, False):
        if first == goes_first:
            made = _try(make)
        _raise_any(group, call, made[1])
    return made[0]  # type: ignore[return-value]  # nothing was raised


def alike(group: HeapGroup, known: Facts, code: Callable[[], str], make: Callable[[], T]) -> T:
    """Collective: this rank's result of `make`, where all ranks call the same program; an error on any rank is raised
    on all. Raises RankMismatchError as `agree`."""
    made, error = _try(make)
    agree(group, known, code, error)
    return made  # type: ignore[return-value]  # nothing was raised


def on_all(group: HeapGroup, make: Callable[[], T]) -> T:
    """Collective: this rank's result of `make`; an error on any rank is raised on all."""
    made, error = _try(make)
    _raise_any(group, CollectiveCall.here("kernel.check"), error)
    return made  # type: ignore[return-value]  # nothing was raised


def _try(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - every rank raises any error
        return None, error


def _raise_any(group: HeapGroup, call: CollectiveCall, own: BaseException | None) -> None:
    raise_any(own, group.all_gather(call, sent(own)))


def facts(program: Program, machine: Machine, options: dict[str, Any]) -> Facts:
    """The facts that ranks building a program must agree on. A builder and this package's source stand for a program
    that was traced by them: its text takes milliseconds to print."""
    given = ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
    known, builder = (machine.name, machine.digest), builder_name(program.func)
    code = f"{builder} of {source_digest()}" if builder else ir.fingerprint(program.func)
    return Facts(program.name, code, known, given or "no options", origin(machine))
