# SPDX-License-Identifier: MIT
"""Lowered programs on disk, next to the compiled kernels: a process that finds both neither lowers nor compiles.

Lowering takes ten times as long as reading its result. A file is named by a digest of all inputs of the lowering: the
traced function with its lines, the target, calibrations, whether ranks share GPUs, the source of this package and
TileLang's version. The source and the name of its builder stand for a function that the package traced, so that it need
not be traced. Files are replaced atomically and never changed, so ranks share them without locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import tilescale
from tilelang_core import compile as stock
from tilelang_core import ir, records
from tilelang_core.files import replacing
from tilescale.backends.cuda.running.toolchain import objection
from tilescale.backends.cuda.target import has_gpu
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.program import LoweredProgram, lower
from tilescale.cost.calibrated import origin
from tilescale.passes.mod_analysis import written_by_peers, written_parameters
from tilescale.program.builder import builder_name
from tilescale.program.model import Program
from tilescale.settings import settings

MOST = 4096
"""Maximum number of files; beyond it, the more recently written half is kept."""

DONE = ".done"
"""Ending of files that say that all kernels of some work are in the caches."""

_PACKAGES = ("tilescale", "tilelang_core")


def cached(program: Program, target: LoweringTarget) -> LoweredProgram:
    """`lower`, read from disk on computers that run the program if it was lowered before. Raises as `lower`."""
    folder = _folder()
    if folder is None:
        return lower(program, target)
    builder = builder_name(program.func)
    name = _by_builder(builder, target) if builder else _digest(program.func, target.sizes, target)
    known = _read(folder / name)
    if known is None:
        known = lower(program, target)
        _keep_answers(known)
        _write(folder / name, known)
    return known


def _keep_answers(made: LoweredProgram) -> None:
    """Find what every process asks of a program: the answers are kept with it."""
    written_parameters(made.program)
    written_by_peers(made.program)
    for grid in made.grids:
        grid.kernel.digest  # noqa: B018 - kept once found


def found(builder: str, target: LoweringTarget) -> LoweredProgram | None:
    """The program of a builder for a target, of which only the number of units matters, if it was lowered before."""
    folder = _folder()
    return _read(folder / _by_builder(builder, target)) if folder is not None else None


def done_file(work: str, target: LoweringTarget) -> Path | None:
    """The file that says that all kernels of some work are in the caches: the process that has compiled them makes it.
    None where there is no cache, and for work without a name."""
    folder = _folder() if work else None
    return folder / f"{_by_builder(work, target)}{DONE}" if folder is not None else None


def _folder() -> Path | None:
    """The folder of the files, where this computer runs programs, and the folder may be trusted."""
    folder = stock.cache_folder() / "lowered"
    return folder if has_gpu() and stock.keeps_kernels() and objection(folder) is None else None


def _by_builder(builder: str, target: LoweringTarget) -> str:
    return _digest(builder, target.devices, target)


def _digest(program: ir.PrimFunc | str, units: Any, target: LoweringTarget) -> str:
    text = program if isinstance(program, str) else records.graph_text([program])
    machine = target.machine.name, target.machine.digest, origin(target.machine)
    job = units, target.stride, target.nccl, target.nvshmem, target.mapped
    given = "\n".join(map(repr, (machine, job, settings().share_gpus, source_digest())))
    return hashlib.sha256(f"{given}\n{text}".encode()).hexdigest()[:32]


@cache
def source_digest() -> str:
    """A digest of this package, its data included, and TileLang's version."""
    made = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    root = Path(tilescale.__file__).parents[1]
    for package in _PACKAGES:
        # Hundreds of files, in the first step of each process: as paths they take longer than to read and hash.
        for folder, folders, names in os.walk(root / package):
            folders[:], inside = sorted({*folders} - {"__pycache__"}), os.path.relpath(folder, root)
            for name in sorted(names):
                with open(f"{folder}/{name}", "rb", buffering=0) as file:
                    made.update(f"{inside}/{name}".encode() + file.readall())
    return made.hexdigest()


def _read(path: Path) -> LoweredProgram | None:
    """The content of a file; None for a missing or damaged one."""
    try:
        known = records.loads(zlib.decompress(path.read_bytes()))
    except Exception:  # noqa: BLE001 - after any error the program can be lowered again
        return None
    return known if isinstance(known, LoweredProgram) else None


def _write(path: Path, made: LoweredProgram) -> None:
    """Write a program, if it can be pickled: one with the user's functions cannot."""
    with contextlib.suppress(Exception):
        data = zlib.compress(records.dumps(made), 1)
        with replacing(path) as written:
            written.write_bytes(data)
        _bound(path.parent)


def _bound(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    if len(files) > MOST:
        for path in (*folder.glob(f"*{DONE}"), *files[: len(files) // 2]):  # no work is done where kernels are missing
            path.unlink(missing_ok=True)
