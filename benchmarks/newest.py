# SPDX-License-Identifier: MIT
"""Compatibility with the newest versions of dependencies on the package index, in a separate environment.

    make test-newest        (python benchmarks/newest.py FOLDER [--only PACKAGE])

Installs one package at a time in front of the tested ones, runs the tests that use it, and prints a row for
docs/compatibility.md: the version, and that the tests passed, or the first failure. Needs the package index; this
environment does not change. PyTorch comes with the libraries that it loads. Libraries for GPUs only (NCCL, NVSHMEM) are
just loaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 1200.0


@dataclass(frozen=True)
class Package:
    """A package of the index.

    Attributes:
        name: on the index.
        tests: those that use it; without any it is only loaded.
        imported: the name of its module.
        library: its shared library, which is loaded.
        complete: whether its dependencies are installed, too; TileLang's would be gigabytes, for the tested PyTorch.
    """

    name: str
    tests: tuple[str, ...] = ()
    imported: str = ""
    library: str = ""
    complete: bool = False


TORCH = ("tests/comm/test_team.py", "tests/ops/test_torch_library.py", "tests/ops/test_arguments.py",
         "tests/ops/test_symm_mem.py", "tests/ops/test_graphs.py")  # fmt: skip
PACKAGES = (
    Package("torch", TORCH, complete=True),
    Package("tilelang", ("tests/language/test_core.py", "tests/emulator/test_phases.py", "tests/cuda/test_texts.py")),
    Package("cuda-bindings", imported="cuda.bindings.driver"),
    Package("nvidia-nccl-cu13", library="nvidia/nccl/lib/libnccl.so.2"),
    Package("nvidia-nvshmem-cu13", library="nvidia/nvshmem/lib/libnvshmem_host.so.3"),
)


def newest(package: Package, folder: Path) -> str:
    """Install the newest version into a folder; return that version. Raises CalledProcessError."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--upgrade", "--target", str(folder)]
    alone = [] if package.complete else ["--no-deps"]
    subprocess.run([*words, *alone, package.name], check=True, timeout=LIMIT_S)
    asked = f"from importlib.metadata import version; print(version({package.name!r}))"
    return run([sys.executable, "-c", asked], folder).stdout.strip()


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Make a command that imports from the folder first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def verdict(package: Package, folder: Path) -> str:
    """Return the outcome: "works", or the last line of the failure."""
    if package.tests:
        done = run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *package.tests], folder)
        said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    else:
        opened = f"import ctypes; ctypes.CDLL({str(folder / package.library)!r})"
        loads = f"import {package.imported}" if package.imported else opened
        done = run([sys.executable, "-c", loads], folder)
        said = done.stderr.splitlines()
    good = "its tests pass" if package.tests else "it loads"
    return good if done.returncode == 0 else f"fails: {' '.join((said or ['no output'])[-1].split())[:160]}"


def main() -> None:
    """Print a row for each package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the newest versions go; a folder for each package")
    parser.add_argument("--only", help="this package alone")
    given = parser.parse_args()
    print("| package | newest | |\n|---|---|---|")
    for package in PACKAGES:
        if given.only in (None, package.name):
            folder = given.folder / package.name
            try:
                found = newest(package, folder)
                print(f"| {package.name} | {found} | {verdict(package, folder)} |", flush=True)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"| {package.name} | | cannot be installed: {type(error).__name__} |", flush=True)


if __name__ == "__main__":
    main()
