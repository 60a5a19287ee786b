# SPDX-License-Identifier: MIT
"""Generated text of programs, and the examples' programs."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import tilelang

from tests.fuzz.together import KERNEL
from tests.ladder import EXAMPLES, load
from tilescale.backends.base import Target
from tilescale.backends.cuda import support
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.passes.pipeline import analyse
from tilescale.passes.retrace import for_machine
from tilescale.program.model import Program
from tilescale.settings import Settings, settings

EMULATED_ONLY = ("19_two_nodes", "20_wafer_mesh", "21_stacked_dram")


def program(func: Any, machine: str = "h200-sxm-8") -> Program:
    """A traced function, taken apart for a machine."""
    described = Machine.load(machine)
    return analyse(for_machine(func, described), described)


def lowered(func: Any, machine: str = "h200-sxm-8", devices: int | None = None) -> support.DeviceLowered:
    """A traced function as the CUDA back end has it."""
    taken_apart = program(func, machine)
    return support.lower(taken_apart, Target.of(taken_apart, Machine.load(machine), devices))


@lru_cache(maxsize=32)
def _lowered_once(func: Any, machine: str, own: Settings) -> support.DeviceLowered:
    """The same for several questions about one function object."""
    return lowered(func, machine)


def of_nvshmem(patch: pytest.MonkeyPatch) -> None:
    """From now on programs are lowered for a job whose heap is NVSHMEM's."""
    patch.setattr(support, "settings", lambda: replace(settings(), heap="nvshmem"))


def texts(func: Any, machine: str) -> list[str]:
    """The checked CUDA text of each kernel of a traced function."""
    with use_machine(machine):
        made = _lowered_once(func, machine, support.settings())
        return made.texts({}) if isinstance(made, support.DeviceLowered) else [made.source({})]


def source(func: Any, machine: str = "h200-sxm-8") -> str:
    """The checked CUDA text of a traced function."""
    with use_machine(machine):
        return _lowered_once(func, machine, support.settings()).source({})


def ptxas(text: str, arch: str = "sm_90a") -> str:
    """Register usage of a text, as the assembler reports it."""
    root = Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.cu"
        source.write_text(text, encoding="utf-8")
        command = ["nvcc", f"-arch={arch}", "-std=c++17", "-O3", "-Xptxas", "-v", "--cubin", *includes, str(source)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder) / "text.cubin")], check=True, capture_output=True, text=True, timeout=240
        )
    return done.stderr


def bodies(text: str) -> str:
    """Kernels of a text without the preamble."""
    return "\n\n".join(KERNEL.findall(text)) + "\n"


def notes(func: Any, machine: str = "h200-sxm-8") -> list[str]:
    """Schedule chosen for a program."""
    return list(_lowered_once(func, machine, support.settings()).notes)


def role_graph(func: Any, machine: str = "h200-sxm-8") -> list[str]:
    """The roles of a program's grids, and the channels between them."""
    return [note for note in notes(func, machine) if re.match(r"(persistent )?roles: |\w+ -> [\w ]+: ", note)]


def example_programs() -> dict[str, Callable[[], list[Any]]]:
    """For each example of the GPUs of one server what traces its programs for the current machine."""
    return {path.stem: partial(_programs, path) for path in EXAMPLES if path.stem not in EMULATED_ONLY}


def _programs(path: Path) -> list[Any]:
    found: list[Any] = []
    example = load(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.common, "run", lambda func, args: found.append(func))
        patch.setattr(example.common, "compare", lambda *_: None)
        example.main(["--devices=4", "--size=256"], standalone_mode=False)
    return found
