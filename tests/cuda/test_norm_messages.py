# SPDX-License-Identifier: MIT
"""The kernels that sum, add a residual and normalise, on the host: all ranks, blocks and threads at once."""

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.host_ranks import CLUSTER, LIMIT_NS, PROCESSORS, THREADS, Library, Ranks, shorten
from tests.packed_scales import unpacked
from tilescale.backends.cuda.running.collectives import exchanges, normalised
from tilescale.backends.cuda.running.collectives.exchanges import SHARING, KernelCapacity, rows_grid
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, normalising
from tilescale.backends.cuda.running.collectives.normalised import SCALINGS
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.timeouts import WaitFailure
from tilescale.program.norm import GROUP, LARGEST, LEAST, packed_words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

EPS, SEVERAL, MARGIN = 1e-3, 3, 256
COLUMNS = {"words": {8: 1, 20: 2, 24: 2, 72: 3}, "lines": {8: 1, 20: 1, 24: 1, 72: 2}}
"""Columns of 16 bits, and the units of a row per thread where there are many rows, of clusters of up to two blocks of
four. A line has 12 columns here: two threads, the last one of which has half as many. Where a row of 20 columns has two
blocks the second one has fewer."""

QUANTIZED = {
    "words": {"tensor": (1, 7), "row": (1, 7), "group": (8,)},
    "lines": {"tensor": (1, 5), "row": (1, 5), "group": (6,)},
}
"""Units of 8 and of 200 columns, by what shares a scale: of groups the first block has 128 columns, of 100 all."""

ROWS = (1, 3, 4, 7, 2, 13)
"""Clusters have one row, several, or none; a row has one block or two."""


def compiled() -> Iterator[HeaderKernel]:
    """All kernels that these tests run."""
    for form, columns in COLUMNS.items():
        for units in sorted({*columns.values()}):
            for ranks in (2, SEVERAL):
                for twice in ("false", "true"):
                    yield kernel(form, "bfloat16", ranks, units, twice)
            for twice in ("false", "true"):
                yield kernel(form, "bfloat16", 2, units, twice, centered=True)
    for form, dtype in itertools.product(COLUMNS, ("float16", "float32")):
        for each, twice in itertools.product((1, 2), ("false", "true")):
            yield kernel(form, dtype, 2, each, twice)
    for form, of_scaling in QUANTIZED.items():
        for scaling, every in of_scaling.items():
            for units, twice in itertools.product(every, ("false", "true")):
                for power in (False, True):
                    yield kernel(form, "bfloat16", 2, units, twice, scaling, power=power)


def kernel(
    form: str,
    dtype: str,
    ranks: int,
    units: int,
    twice: str,
    scaling: str | None = None,
    centered: bool = False,
    power: bool = False,
) -> HeaderKernel:
    flags = str(units), twice, str(centered).lower(), f"tilescale::{SCALINGS[scaling]}", str(power).lower()
    bounds = THREADS, exchanges.ROW_BLOCKS[ranks]
    return HeaderKernel("reduce_norm", form, normalising(dtype), ranks, flags, bounds)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tuple(compiled()), tmp_path_factory.mktemp("host"))


@pytest.fixture(params=["one_shot", "two_shot"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["words", "lines"])
def job(
    request: pytest.FixtureRequest, algorithm: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Make a job of a number of ranks, and a sum of rows of a number of columns."""
    shorten(monkeypatch, request.param, 400)

    def make(
        ranks: int,
        columns: int,
        dtype: str = "bfloat16",
        scaling: str | None = None,
        offset: float = 0,
        power: bool = False,
        packed: bool = False,
        centered: bool = False,
    ) -> tuple[Ranks, Callable[..., None]]:
        made = Ranks(monkeypatch, library, {"device": ranks})
        if scaling == "group":
            monkeypatch.setattr(normalised, "WHOLE", GROUP)
        norm = SimpleNamespace(
            eps=EPS, columns=columns, scaling=scaling, offset=offset, power=power, packed=packed, centered=centered
        )
        collective = SimpleNamespace(name="allreduce", level="device", call=None, reduction="sum", norm=norm, wire=None)
        return made, made.collective(PlacedCollective(collective, None, dtype, None, lambda: None), algorithm)

    make.form = request.param
    return make


def wanted(parts: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor) -> list[torch.Tensor]:
    """The sum, rounded after each step, and the resulting rows."""
    dtype = weight.dtype
    y = parts[0].float()
    for part in parts[1:]:
        y = y + part.float()
    y = y.to(dtype)
    if residual is not None:
        y = (y.float() + residual.float()).to(dtype)
    scale = (y.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt()
    return [y, (y.double() * scale * weight.double())]


def at(x: torch.Tensor, shift: int) -> torch.Tensor:
    """The same numbers, at an offset of some elements from a multiple of 16 bytes, contiguous, between zeros."""
    room = torch.zeros(x.numel() + shift + 2 * MARGIN, dtype=x.dtype)
    begin = -room.data_ptr() // x.itemsize % (16 // x.itemsize) + shift + MARGIN // 2
    return room[begin : begin + x.numel()].view(x.shape).copy_(x)


def between_zeros(x: torch.Tensor) -> bool:
    """Whether nothing is around numbers of `at`."""
    assert x._base is not None
    room, begin = x._base.view(torch.uint8), x.storage_offset() * x.itemsize
    return not room[:begin].any() and not room[begin + x.nbytes :].any()


def check(call: Any, ranks: int, shape: tuple[int, int], dtype: torch.dtype, shift: int, has_residual: bool) -> None:
    """Check one call of all ranks with new numbers, into poisoned memory."""
    parts = [at(torch.randn(shape).to(dtype), shift) for _ in range(ranks)]
    weight, residual = at(torch.randn(shape[1]).to(dtype), 0), at(torch.randn(shape).to(dtype), shift)
    added = residual if has_residual else None
    y, normed = wanted(parts, added, weight)
    brought = [part.clone() for part in parts]
    outs = [[at(torch.full(shape, torch.nan).to(dtype), s) for s in (shift, 0)] for _ in parts]
    call(
        [
            Operands(part, out, weight=weight, normed=rows, residual=added)
            for part, (out, rows) in zip(parts, outs, strict=True)
        ]
    )
    for part, before, (out, rows) in zip(parts, brought, outs, strict=True):
        assert torch.equal(part, before), "what a rank brings stays"
        assert torch.equal(out, y) and between_zeros(out) and between_zeros(rows)
        torch.testing.assert_close(rows.double(), normed, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(rows, outs[0][1]), "all ranks have the same bits"


@pytest.mark.parametrize("columns", [8, 20, 24, 72])
@pytest.mark.parametrize("ranks", [2, SEVERAL])
def test_rows_of_several_units_and_blocks(ranks: int, columns: int, job: Callable[..., Any]):
    several, call = job(ranks, columns)
    room = KernelCapacity(PROCESSORS, 1, THREADS, CLUSTER, exchanges.ROW_UNITS[ranks])
    spread = rows_grid(100, 2 * columns, 8, room, SHARING[job.form])
    assert spread.each == COLUMNS[job.form][columns]
    chance = random.Random(columns)
    for rows in ROWS:
        check(call, ranks, (rows, columns), torch.bfloat16, chance.choice([0, 0, 1]), chance.random() < 0.7)
    assert not several.reports.any()


@pytest.mark.parametrize("gives_normed", [True, False])
@pytest.mark.parametrize(
    ("scaling", "columns"),
    [("tensor", 8), ("row", 8), ("tensor", 200), ("row", 200), ("group", 200), ("packed", 200), ("group", 100),
     ("packed", 100)],
)  # fmt: skip
def test_rows_are_quantized(scaling: str, columns: int, gives_normed: bool, job: Callable[..., Any]):
    packed, offset = scaling == "packed", 1.0
    scaling, power = ("group", True) if packed else (scaling, not gives_normed)
    _, call = job(2, columns, scaling=scaling, offset=offset, power=power, packed=packed)
    for rows in (1, 4):
        parts = [torch.randn(rows, columns).bfloat16() for _ in range(2)]
        weight, residual = torch.randn(columns).bfloat16(), torch.randn(rows, columns).bfloat16()
        if rows > 1:
            for x in (*parts, residual):
                x[1] = 0
        y, _ = wanted(parts, residual, weight)
        exact = y.double() * (y.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt() * (weight.double() + offset)
        scales = scales_of(exact, scaling, power)
        made = []
        for part in parts:
            q, normed = torch.full((rows, columns), 7.0).to(torch.float8_e4m3fn), torch.full((rows, columns), torch.nan)
            given = scales.clone() if scaling == "tensor" else torch.full_like(scales, torch.nan)
            given = torch.full((packed_words(rows, columns),), -1, dtype=torch.int32) if packed else given
            placed = {"quantized": at(q, 0), "scales": at(given, 0)}
            placed.update({"normed": at(normed.bfloat16(), 0)} if gives_normed else {})
            made.append(Operands(part, at(torch.empty_like(part), 0), weight=weight, residual=residual, **placed))
        call(made)
        for one in made:
            assert all(map(between_zeros, (one.target, one.quantized, one.scales)))
            found = unpacked(one.scales, rows, columns) if packed else one.scales
            torch.testing.assert_close(found, scales, rtol=1e-5, atol=0)
            assert torch.equal(one.target, y)
            wide = 1 if scaling == "tensor" else columns if scaling == "row" else GROUP
            factors = scales.view(-1, 1) if wide == 1 else scales.view(rows, -1).repeat_interleave(wide, 1)[:, :columns]
            error = (one.quantized.double() * factors.double() - exact).abs()
            assert (error <= 2**-4 * exact.abs() * 1.01 + 2.0**-10 * factors.double()).all(), "half a unit of float8"
            assert torch.equal(one.quantized.view(torch.uint8), made[0].quantized.view(torch.uint8))
            if gives_normed:
                torch.testing.assert_close(one.normed.double(), exact, rtol=2**-7, atol=1e-6)


def scales_of(exact: torch.Tensor, scaling: str, power: bool) -> torch.Tensor:
    """The scales of exact rows."""
    if scaling == "tensor":
        return torch.tensor([0.06])  # no number of these is so large that it saturates
    wide = exact.shape[1] if scaling == "row" else GROUP
    largest = torch.stack([group.abs().amax(1) for group in exact.split(wide, 1)], 1).clamp(min=LEAST)
    scales = largest / LARGEST
    found = (scales.log2().ceil().exp2() if power else scales).float()
    return found[:, 0] if scaling == "row" else found


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("columns", [20, 72])
def test_layer_norm(columns: int, has_bias: bool, job: Callable[..., Any]):
    """Rows in one block and in two, several of them in a cluster, whose mean is much larger than their deviation."""
    _, call = job(2, columns, centered=True)
    for rows in (1, 13):
        parts = [(torch.randn(rows, columns) + 40).bfloat16() for _ in range(2)]
        weight, bias, residual = (torch.randn(n, columns).bfloat16() for n in (1, 1, rows))
        y, _ = wanted(parts, residual, weight[0])
        shift = bias[0] if has_bias else None
        exact = torch.nn.functional.layer_norm(
            y.double(), (columns,), weight[0].double(), None if shift is None else shift.double(), EPS
        )
        given = {"weight": weight[0], "bias": shift, "residual": residual}
        nothing = torch.full((rows, columns), torch.nan).bfloat16()
        made = [Operands(part, nothing.clone(), normed=nothing.clone(), **given) for part in parts]
        call(made)
        for one in made:
            assert torch.equal(one.target, y)
            torch.testing.assert_close(one.normed.double(), exact, rtol=2**-7, atol=1e-3)
            assert torch.equal(one.normed, made[0].normed)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types(dtype: str, job: Callable[..., Any]):
    _, call = job(2, 24, dtype)
    for rows, shift in ((1, 0), (5, 1)):
        check(call, 2, (rows, 24), getattr(torch, dtype), shift, True)


def test_results_may_take_the_place_of_what_is_read(job: Callable[..., Any]):
    _, call = job(2, 24)
    parts = [torch.randn(4, 24).bfloat16() for _ in range(2)]
    weight, residual = torch.randn(24).bfloat16(), torch.randn(4, 24).bfloat16()
    y, normed = wanted([part.clone() for part in parts], residual, weight)
    residuals = [residual.clone() for _ in parts]
    call(
        [
            Operands(part, added, weight=weight, normed=part, residual=added)
            for part, added in zip(parts, residuals, strict=True)
        ]
    )
    for part, added in zip(parts, residuals, strict=True):
        assert torch.equal(added, y)
        torch.testing.assert_close(part.double(), normed, rtol=2**-7, atol=1e-6)


def test_tensors_with_gaps(job: Callable[..., Any]):
    _, call = job(2, 24)
    wide = [torch.randn(5, 48).bfloat16() for _ in range(2)]
    outs = [torch.full((5, 48), torch.nan).bfloat16() for _ in range(2)]
    weight = torch.randn(24).bfloat16()
    y, normed = wanted([x[:, ::2].clone() for x in wide], None, weight)
    call([Operands(x[:, ::2], o[:, :24], weight=weight, normed=o[:, 24:]) for x, o in zip(wide, outs, strict=True)])
    for out in outs:
        assert torch.equal(out[:, :24], y)
        torch.testing.assert_close(out[:, 24:].double(), normed, rtol=2**-7, atol=1e-6)


def test_who_does_not_come_is_named(algorithm: str, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """No thread is left waiting for its cluster, and no result is written.

    In two steps summing ranks name it: the ranks that wait for their sums wait longer.
    """
    monkeypatch.setattr("tests.cuda.host_ranks.LIMIT_NS", LIMIT_NS // 100)
    three, call = job(SEVERAL, 72)
    outs = [torch.zeros(7, 72, dtype=torch.bfloat16) for _ in range(2)]
    x, weight = torch.randn(7, 72).bfloat16(), torch.ones(72, dtype=torch.bfloat16)
    call([Operands(x, out, weight=weight, normed=out) for out in outs], ranks=[0, 1])
    for rank, out in enumerate(outs):
        stopped, kind, site, absent = three.reports[rank, :4].tolist()
        assert (stopped, kind - 1, site) == (1, WaitFailure.ABSENT, 0)
        assert absent == 2
        assert not out.any()


def test_nothing_is_launched_for_no_rows(job: Callable[..., Any]):
    _, call = job(2, 24)
    none = torch.zeros(0, 24, dtype=torch.bfloat16)
    call([Operands(none, none, weight=torch.ones(24).bfloat16(), normed=none) for _ in range(2)])
