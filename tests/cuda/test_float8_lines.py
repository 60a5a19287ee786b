# SPDX-License-Identifier: MIT
"""Kernels that send floats as float8, on the host: all ranks and threads at once, with the bits of the emulator."""

import random
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.host_ranks import LIMIT_NS, Library, Ranks, shorten
from tilescale.backends.cuda.running.collectives import float8_lines as launcher
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, normalising
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.timeouts import WaitFailure
from tilescale.backends.emulator.numerics.dtypes import to_numpy
from tilescale.backends.emulator.operations import float8_lines as emulated
from tilescale.program.wire import WIDE, WIRE, line_floats

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SEVERAL = 3
COUNTS = (8, 24, 1, 150, 900, 7, 48)
"""Floats of a part: a line has 24 here. Warps have several messages, one, or none."""

HOW = {"all_gather": "direct", "reduce_scatter": "direct", "allreduce": "two_shot"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    made = [
        HeaderKernel(function, launcher.FORM, normalising(dtype), ranks)
        for function, _ in launcher.FUNCTIONS.values()
        for dtype, ranks in (*((dtype, 2) for dtype in WIDE), ("bfloat16", SEVERAL))
    ]
    return Library(made, tmp_path_factory.mktemp("host"))


@pytest.fixture
def job(library: Library, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ranks, Callable[..., None]]]:
    """Make a job of a number of ranks, and a collective."""
    shorten(monkeypatch, "lines", 0)
    monkeypatch.setattr(emulated, "line_floats", lambda: line_floats(2))

    def make(ranks: int, name: str, dtype: str = "bfloat16") -> tuple[Ranks, Callable[..., None]]:
        made = Ranks(monkeypatch, library, {"device": ranks})
        collective = SimpleNamespace(
            name=name, level="device", axis=0, call=None, norm=None, reduction="sum", wire=WIRE
        )
        return made, made.collective(PlacedCollective(collective, None, dtype, None, lambda: None), HOW[name])

    return make


def at(x: torch.Tensor, shift: int) -> torch.Tensor:
    """The same numbers, at an offset of some elements from a multiple of 16 bytes."""
    room = torch.zeros(x.numel() + shift + 16, dtype=x.dtype)
    begin = -room.data_ptr() // x.itemsize % (16 // x.itemsize) + shift
    return room[begin : begin + x.numel()].copy_(x)


def given(count: int, ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers of different sizes, some of them not numbers."""
    made = [torch.randn(count) * 2.0 ** torch.randint(-9, 9, (count,)) for _ in range(ranks)]
    if count > 100:
        made[0][: count // 8] *= torch.finfo(dtype).max / 2000
        made[-1][count // 2] = torch.nan
        made[-1][count // 3] = torch.inf
        made[0][-30:] = 0
    most = torch.finfo(dtype).max
    return [x.where(~x.isfinite(), x.clamp(-most, most)).to(dtype) for x in made]


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("ranks", "dtype"), [*((2, dtype) for dtype in WIDE), (SEVERAL, "bfloat16")])
def test_the_bits_are_those_of_the_emulator(ranks: int, dtype: str, name: str, job: Callable[..., Any]):
    several, call = job(ranks, name, dtype)
    kind, chance = getattr(torch, dtype), random.Random(ranks)
    for count in (*COUNTS, *COUNTS):
        shift = chance.choice([0, 0, 1])
        source = count * ranks if name == "reduce_scatter" else count
        target = count * ranks if name == "all_gather" else count
        parts = [at(x, shift) for x in given(source, ranks, kind)]
        brought = [x.clone() for x in parts]
        arrays = [to_numpy(x) for x in parts]
        want = getattr(emulated, name)(arrays, 0)
        around = [torch.full((target + shift + 40,), 7.0).to(kind) for _ in parts]
        outs = [x[16 + shift : 16 + shift + target] for x in around]
        call([Operands(x, out) for x, out in zip(parts, outs, strict=True)])
        for rank, out in enumerate(outs):
            assert torch.equal(parts[rank].nan_to_num(1), brought[rank].nan_to_num(1)), "what a rank brings stays"
            wanted = torch.from_numpy(want[rank].astype("float32"))
            assert torch.equal(out.float().nan_to_num(12345), wanted.nan_to_num(12345)), (count, rank)
            rest = torch.cat([around[rank][: 16 + shift], around[rank][16 + shift + target :]])
            assert rest.eq(7).all(), "nothing else is written"
    assert not several.reports.any()


def test_one_rank_alone_has_its_tensor(job: Callable[..., Any]):
    _, call = job(1, "allreduce")
    x, out = torch.randn(9).bfloat16(), torch.zeros(9).bfloat16()
    call([Operands(x, out)])
    assert torch.equal(out, x)


@pytest.mark.parametrize("name", HOW)
def test_who_does_not_come_is_named(name: str, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.cuda.host_ranks.LIMIT_NS", LIMIT_NS // 100)
    three, call = job(SEVERAL, name)
    count = 300
    x = torch.randn(count * (SEVERAL if name == "reduce_scatter" else 1)).bfloat16()
    outs = [torch.zeros(count * (SEVERAL if name == "all_gather" else 1)).bfloat16() for _ in range(2)]
    call([Operands(x, out) for out in outs], ranks=[0, 1])
    for rank in range(2):
        stopped, kind, site, absent = three.reports[rank, :4].tolist()
        assert (stopped, kind - 1, site, absent) == (1, WaitFailure.ABSENT, 0, 2)
