# SPDX-License-Identifier: MIT
"""Fixtures of the command line's tests: ranks in this process, which compute on the CPU."""

from tests.comm.conftest import run_ranks
from tests.runtime.conftest import emulated

__all__ = ["emulated", "run_ranks"]
