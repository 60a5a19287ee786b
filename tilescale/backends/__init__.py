# SPDX-License-Identifier: MIT
"""Back ends: their manifest and the choice between them; the CPU, and stock TileLang on GPUs of NVIDIA and AMD."""

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
    done_file,
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
    "done_file",
    "find",
    "generator",
    "register",
    "simulated_us",
]
