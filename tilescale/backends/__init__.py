# SPDX-License-Identifier: MIT
"""Back ends: `base.py` the manifest and the choice, `emulator/` the CPU, `cuda/` stock TileLang on a GPU."""

from tilescale.backends import cuda, emulator
from tilescale.backends.base import Backend, Executable, Lowered, Target, choose, generator, register

register(cuda.BACKEND)
register(emulator.BACKEND)

__all__ = ["Backend", "Executable", "Lowered", "Target", "choose", "generator", "register"]
