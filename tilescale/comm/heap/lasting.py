# SPDX-License-Identifier: MIT
"""Tensors of one device that outlive the call that makes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")


def lasting(make: Callable[[], Made]) -> Made:
    """Make tensors that outlive the current call, on the current stream.

    PyTorch runs a compiled function before it captures it in a CUDA graph. Until then all memory of its thread is from
    the graph's pool, and a tensor that stays in the pool is an error. So another thread makes these tensors. Memory of
    a graph that is being captured is the graph's, and stays.
    """
    import torch

    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return make()
    stream = torch.cuda.current_stream()

    def made() -> Made:
        torch.cuda.set_device(stream.device)  # a thread begins on the first one, where `stream` makes a context
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "tilescale-memory") as thread:
        return thread.submit(made).result()
