# SPDX-License-Identifier: MIT
"""Common parts of scripts of named checks: the requested ones run in order, each is reported by every rank."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import torch

import tilescale


def run(checks: Iterable[tuple[str, Callable[[], object]]], limit_s: float) -> None:
    """Run the checks whose names contain one of the script's arguments, and end the process.

    A check that raises is reported with the end of its traceback, and the next one runs. After `limit_s` seconds the
    process ends, also if a check hangs. The exit code is 0 if all passed on all ranks.
    """
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    threading.Timer(limit_s, _out_of_time).start()
    failed = False
    for name, check in checks:
        if not any(part in name for part in sys.argv[1:] or [""]):
            continue
        begin = time.perf_counter()
        try:
            check()
            verdict = "PASS"
        except Exception:  # noqa: BLE001 - reported, and the next check runs
            verdict = f"FAIL {traceback.format_exc(limit=-3)}"
        print(f"rank {world.rank} {name}: {verdict} ({time.perf_counter() - begin:.1f} s)", flush=True)
        failed = any(world.all_gather(verdict != "PASS")) or failed
    os._exit(1 if failed else 0)


def _out_of_time() -> None:
    print("FAIL: out of time", flush=True)
    faulthandler.dump_traceback()
    os._exit(2)
