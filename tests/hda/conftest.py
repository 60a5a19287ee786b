# SPDX-License-Identifier: MIT
"""A small description that tests change line by line."""

from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = """\
title: a small machine
levels:
  lane:
    kind: thread_group
    threads: 1
  core:
    kind: program
    count: 4
    clock: 1 GHz
    compute:
      vector:
        rates:
          float32: 16 op/clock
  chip:
    kind: unit
    count: 6
memory:
  l0:
    level: core
    scopes: [fragment, shared]
    capacity: 64 KiB
    shared: true
  l1:
    level: chip
    scopes: [global]
    capacity: 1 GiB
    shared: true
networks:
  wire:
    level: chip
    topology: ring
    bandwidth: 100 GB/s
    latency: 1 us
    reaches: l1
    mechanisms:
      dma:
        put: 90 %
        get: 80 GB/s
        startup: 2 us
"""


@pytest.fixture
def small() -> str:
    return SMALL


@pytest.fixture
def describe(tmp_path: Path) -> Callable[..., Path]:
    """Writes a description and returns its path; `replace` pairs change the small one."""

    def write(*replacements: tuple[str, str], text: str = SMALL, name: str = "small.yaml") -> Path:
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new, 1)
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
