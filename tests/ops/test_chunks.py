# SPDX-License-Identifier: MIT
"""GEMMs between nodes are processed in chunks: results, and the order of work on two streams."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
from tilescale.ops import chunks, unfused, whole_tensors

RANKS, ROWS, K, N = 4, 300, 24, 16


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """All ranks of two nodes, all with the same number; chunks of 128 rows."""
    machine = tmp_path / "two.yaml"
    machine.write_text("extends: h200-sxm-8x4\nlevels:\n  node:\n    count: 2\n  device:\n    count: 2\n")
    monkeypatch.setattr(chunks, "WHOLE_BYTES", 0)
    monkeypatch.setattr(chunks, "message_bytes", lambda path: 1)
    monkeypatch.setattr(whole_tensors, "gathered", lambda a, team: a.repeat(RANKS, *[1] * (a.ndim - 1)))
    monkeypatch.setattr(whole_tensors, "scattered", lambda a, team: RANKS * a.chunk(RANKS)[team.rank])
    monkeypatch.setattr(whole_tensors, "summed", lambda a, team: a.mul_(RANKS))
    with tilescale.use_machine(str(machine)):
        yield SimpleNamespace(size=RANKS, rank=0)


def test_chunks_are_whole_tiles_of_rows_between_nodes_alone(team: Any, monkeypatch: pytest.MonkeyPatch):
    assert chunks.chunks(ROWS, 2 * K, team) == [slice(0, 128), slice(128, 256), slice(256, 300)]
    assert chunks.chunks(ROWS, 2 * K, SimpleNamespace(size=2)) == [slice(0, ROWS)]
    monkeypatch.undo()
    assert len(chunks.chunks(1 << 15, 1 << 14, team)) > 4, "of the size that the network wants"
    assert chunks.chunks(16, 1 << 14, team) == [slice(0, 16)]


@pytest.mark.parametrize("gated", [False, True])
def test_a_gather_and_a_product(gated: bool, team: Any):
    a, bias = torch.randn(ROWS, K), torch.randn(2 * N)
    weights = [torch.randn(K, N), torch.randn(K, N)]
    ending = partial(import_module("tilescale.ops.ag_gemm")._ended, "silu", gated)
    *results, whole = unfused.gathered_gemms(a, weights, bias.chunk(2), None, True, team, ending)
    each = [a @ w + b for w, b in zip(weights, bias.chunk(2), strict=True)]
    silu = torch.nn.functional.silu
    wanted = [silu(each[0]) * each[1]] if gated else list(map(silu, each))
    assert whole.equal(a.repeat(RANKS, 1))
    for got, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(got, want.repeat(RANKS, 1))


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_a_sum(biased: bool, team: Any):
    a, b = torch.randn(K, RANKS * ROWS).t(), torch.randn(K, N)
    bias = torch.randn(N) if biased else None
    want = RANKS * (a @ b + (0 if bias is None else bias))
    torch.testing.assert_close(unfused.summed_gemm(a, b, bias, None, team, scatters=True), want[:ROWS])
    torch.testing.assert_close(unfused.summed_gemm(a, b, bias, None, team), want)


class Stream:
    """One that writes down what is launched on it, and what it waits for."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits")


def logged(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[str]:
    """Operations of two streams, in the order of the host's calls."""
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(chunks, "init", lambda: SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(chunks, "_side", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: chunks.nullcontext(log.append(f"on {stream.name}:")))
    run([slice(0, 1), slice(1, 2)], log)
    return log


def test_the_next_gather_does_not_wait_for_a_product(monkeypatch: pytest.MonkeyPatch):
    found = logged(
        monkeypatch,
        lambda parts, log: chunks.received_first(
            parts, lambda part: log.append("gather"), lambda got: log.append("product")
        ),
    )
    each = ["on side:", "gather", "main waits", "product"]
    assert found == ["side waits", *each, *each, "main waits"]


def test_the_next_product_does_not_wait_for_a_sum(monkeypatch: pytest.MonkeyPatch):
    found = logged(
        monkeypatch,
        lambda parts, log: chunks.sent_after(
            parts, lambda part: log.append("product"), lambda made, part: log.append("sum") or torch.ones(1)
        ),
    )
    each = ["product", "side waits", "on side:", "sum"]
    assert found == ["side waits", *each, *each, "main waits"]
