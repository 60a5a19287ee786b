# SPDX-License-Identifier: MIT
"""Tests do not depend on the shell that they are started from."""

import os

for _name in [name for name in os.environ if name.startswith("TILESCALE_")]:
    del os.environ[_name]


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")
