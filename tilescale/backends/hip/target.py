# SPDX-License-Identifier: MIT
"""The compilation target of a machine's AMD GPUs."""

from __future__ import annotations

import re

from tilescale.errors import UnsupportedError
from tilescale.hda import Machine

_PROCESSOR = re.compile(r"gfx[0-9a-f]+")


def target_for(machine: Machine) -> dict[str, str]:
    """The target that stock TileLang compiles for.

    Raises:
        UnsupportedError: the machine's description names no architecture of AMD.
    """
    processor = machine.identify.architecture
    if not _PROCESSOR.fullmatch(processor):
        raise UnsupportedError(f"machine {machine.name!r} has no architecture of AMD GPUs, such as gfx942")
    return {"kind": "hip", "mcpu": processor}
