# SPDX-License-Identifier: MIT
"""Back ends: `base.py` the manifest and the choice, `emulator/` the CPU, `cuda/` and `hip/` stock TileLang on GPUs of
NVIDIA and AMD.

`processes.py` compiles several kernels at once; `progress.py` shows a bar. `services.py` is the part of a manifest for
operators, measurements and `tilescale doctor`.
"""

from tilescale.backends import cuda, emulator, hip
from tilescale.backends.base import (
    Backend,
    Compilation,
    Executable,
    Lowered,
    LoweredBefore,
    Target,
    choose,
    compiles,
    device_services,
    find,
    generator,
    register,
    simulated_us,
)

register(cuda.BACKEND)
register(hip.BACKEND)
register(emulator.BACKEND)

__all__ = [
    "Backend",
    "Compilation",
    "Executable",
    "Lowered",
    "LoweredBefore",
    "Target",
    "choose",
    "compiles",
    "device_services",
    "find",
    "generator",
    "register",
    "simulated_us",
]
