# SPDX-License-Identifier: MIT
"""Environment of a measurement: the computer and the versions of its software, as results name them."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

import tilescale


def machine() -> dict[str, Any]:
    """This computer."""
    return {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}


def versions() -> dict[str, str]:
    """Versions of the software that ran."""
    found = {"tilescale": tilescale.__version__, "tilelang": version("tilelang"), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {**found, "python": platform.python_version()}
