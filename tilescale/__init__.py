# SPDX-License-Identifier: MIT
"""TileScale: tile programs for a whole machine, from threads to nodes.

    import tilescale, tilescale.language as T

    tilescale.jit, compile      make kernels          tilescale.emulate       run on the CPU for a described machine
    tilescale.init              join the job          tilescale.Machine       machines as data
    tilescale.shrink            continue without dead ranks
    tilescale.empty, zeros, from_tensor               tensors that peers can reach
    tilescale.use_machine       trace for a machine   tilescale.errors        one class per mistake
    tilescale.stand_in          external functions for the emulator
    tilescale.ops               finished operators and layers for PyTorch
    tilescale.autotune          the fastest configuration     tilescale.calibrated    a machine as it was measured
    tilescale.measured          the fastest schedule of a program's collectives

Importing this package reads nothing, writes nothing and probes nothing; names load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Kernel": "tilescale.runtime.kernel",
    "Machine": "tilescale.hda",
    "Move": "tilescale.passes.overlap.schedule",
    "Report": "tilescale.backends.emulator.report",
    "Schedule": "tilescale.passes.overlap.schedule",
    "World": "tilescale.comm",
    "autotune": "tilescale.tuning.autotune",
    "calibrated": "tilescale.cost.calibrated",
    "compile": "tilescale.runtime.compile",
    "current_machine": "tilescale.hda.current",
    "emulate": "tilescale.backends.emulator.emulate",
    "empty": "tilescale.comm",
    "from_tensor": "tilescale.comm",
    "init": "tilescale.comm",
    "jit": "tilescale.runtime.compile",
    "measured": "tilescale.tuning.schedules",
    "shrink": "tilescale.comm",
    "stand_in": "tilescale.backends.emulator.operations.stand_ins",
    "use_machine": "tilescale.hda.current",
    "zeros": "tilescale.comm",
}
_MODULES = ("errors", "hda", "language", "ops")

__all__ = sorted([*_HOMES, *_MODULES])

if TYPE_CHECKING:
    from tilescale import errors, hda, language, ops
    from tilescale.backends.emulator.emulate import emulate
    from tilescale.backends.emulator.operations.stand_ins import stand_in
    from tilescale.backends.emulator.report import Report
    from tilescale.comm import World, empty, from_tensor, init, shrink, zeros
    from tilescale.cost.calibrated import calibrated
    from tilescale.hda import Machine
    from tilescale.hda.current import current_machine, use_machine
    from tilescale.passes.overlap.schedule import Move, Schedule
    from tilescale.runtime.compile import compile, jit
    from tilescale.runtime.kernel import Kernel
    from tilescale.tuning.autotune import autotune
    from tilescale.tuning.schedules import measured


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"tilescale.{name}")
    elif name == "T":  # for `from tilescale import T`
        value = importlib.import_module("tilescale.language")
    else:
        from tilescale.errors import unknown_attribute

        raise unknown_attribute(__name__, name, __all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
