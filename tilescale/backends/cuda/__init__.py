# SPDX-License-Identifier: MIT
"""Programs on NVIDIA GPUs through stock TileLang.

Folders: `headers` (device functions in PTX), `running` (on the GPUs), `native` (host code in C). `../tilelang` turns
programs into TileLang functions.
"""

from __future__ import annotations

from tilelang_core.compile import default_target
from tilescale.backends.base import Backend
from tilescale.backends.cuda.support import check, collectives, done_file, find, lower
from tilescale.backends.cuda.target import has_gpu, target_for
from tilescale.backends.services import DeviceServices
from tilescale.settings import settings


def _available() -> bool:
    return has_gpu() and not settings().emulate


def _services() -> DeviceServices:
    from tilescale.backends.cuda.running.services import SERVICES

    return SERVICES


BACKEND = Backend(
    "cuda",
    available=_available,
    lower=lower,
    priority=10,
    generates=True,
    target=target_for,
    collectives=collectives,
    check=check,
    find=find,
    done_file=done_file,
    pin=default_target,
    services=_services,
)
