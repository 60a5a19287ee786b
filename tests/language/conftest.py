# SPDX-License-Identifier: MIT
"""Common parts of tests of the language: mistakes that name the user's line, and programs run on all devices."""

import contextlib
import linecache
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.again import lowered
from tilescale.errors import TileScaleError

__all__ = ["lowered", "mistake"]

MARK = "# <-"
"""Mark at the end of the line that an error must name."""


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def mistake(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with mistake(SomeError, "what was found", ...):` around a program with a mistake in the line marked `# <-`.

    The error is of exactly that class, names the marked line of the test first, contains the texts and a hint, and
    TileLang logs nothing.
    """

    @contextlib.contextmanager
    def check(cls: type[TileScaleError], *texts: str) -> Iterator[None]:
        log, logger = _Records(), logging.getLogger("tilelang")
        logger.addHandler(log)
        try:
            with pytest.raises(TileScaleError) as caught:
                yield
        finally:
            logger.removeHandler(log)
        error = caught.value
        assert type(error) is cls
        assert error.where, f"{error!r} names no line"
        place = error.where[0]
        assert place.file == str(request.path)
        assert linecache.getline(place.file, place.line).rstrip().endswith(MARK), f"{place} is not the marked line"
        for text in texts:
            assert text in str(error)
        assert error.hint
        assert not log.records

    return check
