# SPDX-License-Identifier: MIT
"""Fixtures that the tests of the CUDA back end share: golden texts, ranks, and mistakes that name the user's line."""

from tests.comm.conftest import run_ranks
from tests.golden.conftest import golden
from tests.language.conftest import mistake

__all__ = ["golden", "mistake", "run_ranks"]
