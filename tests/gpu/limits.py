# SPDX-License-Identifier: MIT
"""Time limit of a check, so that one which hangs reports its position, and does not occupy the GPUs."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

CODE = 3
"""With which a process ends that was not done in time."""


@contextlib.contextmanager
def bounded(what: str, seconds: float) -> Iterator[None]:
    """Print the next step; after a time limit print all threads' stacks, and end the process."""
    print(f"INFO begins: {what}", flush=True)

    def end() -> None:
        print(f"FAIL {what}: still running after {seconds:g} s", flush=True)
        faulthandler.dump_traceback(sys.stdout, all_threads=True)
        sys.stdout.flush()
        os._exit(CODE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
