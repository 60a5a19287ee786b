# SPDX-License-Identifier: MIT
"""Kernels whose compilation begins before any run needs them. The first call of each waits until it is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilelang_core.files import replacing
from tilescale.backends.processes import COMPILING
from tilescale.comm import Team
from tilescale.runtime.ahead import Finder, NeededKernels, compile_others, done_file

if TYPE_CHECKING:
    from tilescale.runtime.kernel import Kernel

_begun = NeededKernels()
"""Those that have not been called since; the same on each rank."""


class MetKernels(NeededKernels):
    """The kernels that a dry run meets, none of which is compiled."""

    def add(self, kernel: Kernel) -> None:
        """Note a kernel."""
        self.now.append(kernel)


def begin(
    kernels: Iterable[Kernel], later: Mapping[tuple[Finder, tuple[Any, ...]], None], listing: Path | None = None
) -> None:
    """Begin to compile kernels, the same on each rank, in processes that only the first call of a kernel waits for.

    Args:
        kernels: those of many rows.
        later: functions that find the kernels of all row counts, as in `NeededKernels`; they begin when these have
            ended.
        listing: the file for `are_compiled`.
    """
    _begun.later |= later
    for kernel in kernels:
        _begun.add(kernel)
    _begun.begin(_begun.most)
    done = [done_file(*each) for each in later]
    if listing is not None and all(done):
        with contextlib.suppress(OSError), replacing(listing) as made:
            made.write_text("\n".join(file.name for file in done if file is not None), encoding="utf-8")


def are_compiled(listing: Path | None) -> bool:
    """Whether the caches have all kernels of a `begin` with this listing, in an earlier process."""
    if listing is None:
        return False
    try:
        names = listing.read_text(encoding="utf-8").split()
    except OSError:  # there is none, or another process has removed it
        return False
    return all((listing.parent / name).exists() for name in names)


def taken() -> NeededKernels:
    """The compilations that have begun, for a warm-up that waits for those of its kernels; nothing else does from now
    on."""
    global _begun
    found, _begun = _begun, NeededKernels()
    found.now.clear()
    return found


def finish(kernel: Kernel, team: Team) -> None:
    """Wait until a kernel is compiled, if its compilation has begun. Collective over its team, on its first call."""
    if kernel in _begun.now:
        _begun.now.remove(kernel)
        compile_others([kernel])  # meanwhile
        _begun.wait_for(kernel, None if team.rank else COMPILING)
        if team.size > 1:
            team.barrier()  # each rank compiles some of them
    if _begun.later and not _begun.busy:
        _begun.begin_later()
        _begun.later.clear()
