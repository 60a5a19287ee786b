# SPDX-License-Identifier: MIT
"""Python's cyclic garbage collector, switched off while many small long-lived objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def no_cyclic_collection(wanted: bool = True) -> Iterator[None]:
    """Records and simulations grow by hundreds of thousands of objects without a cycle worth freeing; the collector
    would look at all of them again and again, and take most of the time. It is on again afterwards if it was."""
    before = gc.isenabled()
    if wanted:
        gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


_OF_PYTHON = 1000
"""More objects than an interpreter freezes at its start: Python 3.12 does so with some hundred. More are a user's."""


@contextlib.contextmanager
def long_lived() -> Iterator[None]:
    """`no_cyclic_collection` where many of the objects stay for the rest of the process.

    The next full collection leaves out all objects that there are at the end of the block; later ones do not. In a
    process with a model, looking at all of them takes half a second, in the first step after the block.
    """
    global _has_frozen
    with no_cyclic_collection():
        try:
            yield
        finally:
            if _has_frozen or gc.get_freeze_count() < _OF_PYTHON:  # else a user has frozen objects, which stay so
                gc.freeze()
                _has_frozen = True
                if _unfreeze not in gc.callbacks:
                    gc.callbacks.append(_unfreeze)


_has_frozen = False
"""Whether `long_lived` has frozen objects since the last full collection."""


def _unfreeze(phase: str, info: Mapping[str, int]) -> None:
    """Let collections after a full one look at all objects again."""
    global _has_frozen
    if _has_frozen and phase == "stop" and info["generation"] == 2:
        _has_frozen = False
        gc.unfreeze()
