# SPDX-License-Identifier: MIT
"""Back ends: `base.py` the manifest and the choice, `emulator/` the CPU, `cuda/` stock TileLang on a GPU.

`processes.py` compiles several kernels at once; `progress.py` shows a bar.
"""

from tilescale.backends import cuda, emulator
from tilescale.backends.base import Backend, Compilation, Executable, Lowered, Target, choose, generator, register

register(cuda.BACKEND)
register(emulator.BACKEND)

__all__ = ["Backend", "Compilation", "Executable", "Lowered", "Target", "choose", "generator", "register"]
