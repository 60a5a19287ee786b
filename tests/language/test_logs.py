# SPDX-License-Identifier: MIT
"""What TileLang logs while it compiles for us."""

import logging

import pytest
import tilelang
from tvm import tirx

from tilelang_core import compile as stock
from tilelang_core import ir

NOTHING = tirx.PrimFunc([], tirx.Evaluate(0))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """Compile something with a TileLang that logs, and return what its handlers let through."""
    handler = logging.getLogger("tilelang").handlers[0]
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(handler, "emit", records.append)

    def log(func: ir.PrimFunc) -> None:
        logger = logging.getLogger("tilelang.jit.kernel")
        logger.info("begins")
        logger.warning("minds")

    monkeypatch.setattr(tilelang, "compile", log)

    def run(through) -> list[str]:
        records.clear()
        through()
        return [record.getMessage() for record in records]

    return run


def test_information_is_off_until_our_logger_asks_for_it(compiled):
    logger = logging.getLogger("tilescale")
    assert compiled(lambda: stock.compile_kernel(NOTHING)) == ["minds"]
    logger.setLevel("INFO")
    try:
        assert compiled(lambda: stock.compile_kernel(NOTHING)) == ["begins", "minds"]
    finally:
        logger.setLevel(logging.NOTSET)


def test_tilelang_by_itself_logs_as_ever(compiled):
    assert compiled(lambda: tilelang.compile(None)) == ["begins", "minds"]
