# SPDX-License-Identifier: MIT
"""Lowered programs on disk, next to the compiled kernels: a process that finds both neither lowers nor compiles.

Lowering takes ten times as long as reading its result. A file is named by a digest of all inputs of the lowering: the
traced function with its lines, the target, calibrations, settings, the source of this package and TileLang's version.
Files are replaced atomically and never changed, so ranks share them without locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import zlib
from functools import cache
from pathlib import Path

import tilescale
from tilelang_core import compile as stock
from tilelang_core import records
from tilelang_core.files import replacing
from tilescale.backends.cuda.running.toolchain import objection
from tilescale.backends.cuda.target import has_gpu
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.program import LoweredProgram, lower
from tilescale.cost.calibrated import origin
from tilescale.program.model import Program
from tilescale.settings import settings

MOST = 4096
"""Maximum number of files; beyond it, the more recently written half is kept."""

_PACKAGES = ("tilescale", "tilelang_core")


def cached(program: Program, target: LoweringTarget) -> LoweredProgram:
    """`lower`, read from disk on computers that run the program if it was lowered before. Raises as `lower`."""
    folder = stock.cache_folder() / "lowered"
    if not has_gpu() or not stock.keeps_kernels() or objection(folder) is not None:
        return lower(program, target)
    path = folder / _digest(program, target)
    found = _read(path)
    if found is None:
        found = lower(program, target)
        _write(path, found)
    return found


def _digest(program: Program, target: LoweringTarget) -> str:
    machine = target.machine.name, target.machine.digest, origin(target.machine)
    units = target.sizes, target.stride, target.nccl, target.nvshmem, target.mapped
    text = "\n".join(map(repr, (machine, units, settings(), _source())))
    return hashlib.sha256(f"{text}\n{records.graph_text([program.func])}".encode()).hexdigest()[:32]


@cache
def _source() -> str:
    """A digest of this package, its data included, and TileLang's version."""
    made = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    root = Path(tilescale.__file__).parents[1]
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                made.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return made.hexdigest()


def _read(path: Path) -> LoweredProgram | None:
    """The content of a file; None for a missing or damaged one."""
    try:
        found = records.loads(zlib.decompress(path.read_bytes()))
    except Exception:  # noqa: BLE001 - after any error the program can be lowered again
        return None
    return found if isinstance(found, LoweredProgram) else None


def _write(path: Path, made: LoweredProgram) -> None:
    """Write a program, if it can be pickled: one with the user's functions cannot."""
    with contextlib.suppress(Exception):
        data = zlib.compress(records.dumps(made), 1)
        with replacing(path) as written:
            written.write_bytes(data)
        _bound(path.parent)


def _bound(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in files[: len(files) // 2] if len(files) > MOST else ():
        path.unlink(missing_ok=True)
