# SPDX-License-Identifier: MIT
"""TileLang's log while it compiles for TileScale."""

import logging
from functools import partial

import pytest
import tilelang
from tilelang.cache.kernel_cache import KernelCache
from tvm import tirx

from tilelang_core import compile as stock
from tilelang_core import ir

NOTHING = tirx.PrimFunc([], tirx.Evaluate(0))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch):
    """Compile a program with a TileLang that logs, and return the records that its handlers pass."""
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
    assert compiled(lambda: stock.KernelCompilation(NOTHING).run()) == ["minds"]
    logger.setLevel("INFO")
    try:
        assert compiled(lambda: stock.KernelCompilation(NOTHING).run()) == ["begins", "minds"]
    finally:
        logger.setLevel(logging.NOTSET)


def test_tilelang_by_itself_logs_as_ever(compiled):
    assert compiled(lambda: tilelang.compile(None)) == ["begins", "minds"]


def test_our_users_are_not_advised_how_to_call_tilelang(compiled, monkeypatch: pytest.MonkeyPatch):
    """Programs share small kernels, such as the barrier of ranks, which TileLang's cache then has."""
    kernels = KernelCache()
    monkeypatch.setattr(kernels, "_generate_key", lambda **_: "key")
    monkeypatch.setattr(kernels, "_memory_cache", {"key": "the kernel"})
    again = partial(kernels.cached, NOTHING, target="c", verbose=False)
    monkeypatch.setattr(tilelang, "compile", lambda func: again())
    assert compiled(lambda: stock.KernelCompilation(NOTHING).run()) == []
    assert len(compiled(again)) == 1
