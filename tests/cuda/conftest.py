# SPDX-License-Identifier: MIT
"""Fixtures that the tests of the CUDA back end share: golden texts, and mistakes that name the user's line."""

from tests.golden.conftest import golden
from tests.language.conftest import mistake

__all__ = ["golden", "mistake"]
