# SPDX-License-Identifier: MIT
"""Tests do not depend on the shell that they are started from, and each process of theirs uses one processor."""

import os

for _name in [name for name in os.environ if name.startswith("TILESCALE_")]:
    del os.environ[_name]

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: tests run side by side, and idle threads of OpenMP spin


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")
