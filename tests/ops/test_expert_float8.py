# SPDX-License-Identifier: MIT
"""The program of a layer of float8 experts, emulated with all checks, in memory full of NaN."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import tilescale
from tests.cuda.support import ptxas, source
from tests.ops.expert_grids import works
from tests.ops.float8_experts import (
    EMULATED,
    GRADIENTS,
    ON_THE_WIRE,
    near,
    quantized,
    random_expert,
    trained,
    wanted,
    whole,
)
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import expert_float8, expert_programs, moe_tables, row_exchange
from tilescale.ops.expert_programs import LayerForm

LOCAL, FEATURES, INNER, CHOICES, MOST, ROOM = 2, 384, 128, 2, 5, 768

ROUTES = {
    "random": lambda size: torch.randint(-1, size * LOCAL, (size, MOST, CHOICES)),
    "all to the last expert": lambda size: torch.full((size, MOST, CHOICES), size * LOCAL - 1),
    "none to the last rank": lambda size: torch.randint(0, LOCAL, (size, MOST, CHOICES)),
    "a rank has one token, others none": lambda size: torch.full((size, MOST, CHOICES), -1).index_put_(
        (torch.tensor(0), torch.tensor(0)), torch.tensor([1, 2])
    ),
}


@pytest.mark.parametrize(("size", "route"), [*enumerate(ROUTES, 1)])
def test_a_layer_of_float8_experts(size: int, route: str):
    run_layer(size, ROUTES[route](size), LayerForm("bfloat16", False), seed=size % 2)


@pytest.mark.parametrize(
    ("size", "route"),
    [
        pytest.param(size, route, marks=[pytest.mark.nightly] * ((size == 1) != (number % 2)))
        for size in (1, 3)
        for number, route in enumerate(ROUTES)
    ],
)
def test_sums_that_travel_as_float8(size: int, route: str):
    run_layer(size, ROUTES[route](size), LayerForm("bfloat16", size == 1, narrow_sums=True), seed=1)


@pytest.mark.parametrize(("high", "senders", "chunks"), [(4, 2, 3), (8, 9, 256)])
def test_sums_in_several_tiles(high: int, senders: int, chunks: int, monkeypatch: pytest.MonkeyPatch):
    """Several tiles for each flag and each sender, or as many blocks for one. Where nothing comes for the tokens of a
    tile, it reads none of the sums for later ones, which may still arrive.
    """
    for name, value in (("HIGH", high), ("SUMMING_SENDERS", senders), ("SENDERS", senders), ("CHUNKS", chunks)):
        monkeypatch.setattr(expert_float8, name, value)
    chosen = ROUTES["random"](2)
    chosen[:, :2], chosen[:, 2:, 0] = -1, torch.tensor([[LOCAL], [0]])
    run_layer(2, chosen, LayerForm("bfloat16", False, narrow_sums=True), seed=2)


def test_rows_and_products_that_are_kept():
    """Rows are quantized tokens, exactly; products are those of these rows."""
    given, experts, x = run_layer(2, ROUTES["random"](2), LayerForm("bfloat16", False, keeps=True), seed=0)
    for rank, tensors in enumerate(given):
        wide, hidden, owners, places = (tensors[i] for i in (-9, -8, 18, 22))
        for home, place in enumerate(places):
            for row in place[place >= 0].tolist():
                gate_up, _, of_gate_up, _ = experts[rank * LOCAL + int(owners[row // 128])]
                assert (quantized(x[home]) == wide[row].double()).all(1).any()
                near("products", hidden[row], whole(gate_up, of_gate_up) @ wide[row].double())


def run_layer(size: int, chosen: torch.Tensor, form: LayerForm, seed: int) -> tuple[list, list, torch.Tensor]:
    """Emulate the layer of all ranks and compare it with float64."""
    experts = [random_expert(FEATURES, INNER, by_rows=form.by_rows) for _ in range(size * LOCAL)]
    x, weights = torch.randn(size, MOST, FEATURES).bfloat16(), torch.rand(size, MOST, CHOICES)
    per_device = [arguments(size, r, x[r], chosen[r], weights[r], experts, form) for r in range(size)]
    program = expert_programs.layer_program(size, LOCAL, CHOICES, FEATURES, INNER, "int64", form, 0)
    tilescale.emulate(program, per_device, schedule_seed=seed)
    for r in range(size):
        want = wanted(x[r], chosen[r], weights[r], experts)
        near(f"rank {r}", per_device[r][-2], want, ON_THE_WIRE if form.narrow_sums and size > 1 else EMULATED)
    return per_device, experts, x


def arguments(
    size: int,
    rank: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: list,
    form: LayerForm,
) -> list:
    """Of the program on a rank."""
    mine = zip(*experts[rank * LOCAL :][:LOCAL], strict=True)
    gate_up, down, of_gate_up, of_down = (torch.stack(each) for each in mine)
    of_choices, groups = moe_tables.arriving_choices(size, MOST, CHOICES), MOST * FEATURES // 128
    in_sums = [sums(size, MOST, FEATURES), of_numbers(1, 1)]
    if form.narrow_sums:
        in_sums = [numbers(size, groups, 128), of_numbers(size, groups)]
    inboxes = numbers(size, groups, 128), of_numbers(size, groups), *in_sums
    counted = torch.empty(moe_tables.form_of_counts(size, LOCAL, MOST, CHOICES)[0], dtype=torch.int32)
    tables = counted, *moe_tables.new_tables(chosen, size, LOCAL, MOST, ROOM)
    kept = [(ROOM, FEATURES), (ROOM, 2 * INNER)] if form.keeps else [(1, 1), (1, 1)]
    rows = *(sums(*shape) for shape in kept), numbers(ROOM, FEATURES), of_numbers(FEATURES // 128, ROOM)
    active = numbers(ROOM, INNER), of_numbers(1, ROOM)
    given = x, of_numbers(1), chosen.reshape(-1), weights.reshape(-1), gate_up, of_gate_up, down, of_down
    arrived = torch.full(of_choices, -9, dtype=torch.int32), of_numbers(*of_choices), *inboxes
    made = sums(ROOM, FEATURES), sums(MOST, FEATURES), row_exchange.sharers(FEATURES, 8, MOST)
    return [*given, *arrived, *tables, *rows, *active, *made]


def numbers(*shape: int) -> torch.Tensor:
    return of_numbers(*shape).to(torch.float8_e4m3fn)


def of_numbers(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def sums(*shape: int) -> torch.Tensor:
    return of_numbers(*shape).bfloat16()


BFLOAT = {"gate_up": torch.zeros(1, 256, 128).bfloat16(), "down": torch.zeros(1, 128, 128).bfloat16(), "scales": None}


def test_tokens_with_infinities_are_nan():
    """Of their own results alone; zeros stay zeros, and small and large groups keep their precision."""
    gate_up, down, *scales = (t[None] for t in random_expert(256, 128))
    x = torch.randn(5, 256).bfloat16()
    x[1, 3], x[2], x[3, :128] = torch.inf, 0, x[3, :128] * 2.0**-100
    chosen, weights = torch.zeros(5, 1).long(), torch.ones(5, 1)
    y = ops.moe_layer(x, (chosen, weights), gate_up, down, scales=tuple(scales))
    assert y[1].isnan().all() and not y[2].any()
    rest = [0, 2, 3, 4]
    experts = [[t[0] for t in (gate_up, down, *scales)]]
    near("the others", y[rest], wanted(x[rest], chosen[rest], weights[rest], experts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {"scales": None}, "gate_up is torch.float8_e4m3fn"),
        (lambda given: {"scales": given["scales"][:1]}, "scales is 1 things"),
        (lambda given: {"scales": given["scales"][::-1]}, r"scales\[0\] has shape"),
        (lambda given: {"scales": tuple(s.bfloat16() for s in given["scales"])}, r"scales\[0\] is torch.bfloat16"),
        (lambda given: {"gate_up": given["gate_up"].bfloat16()}, "gate_up is torch.bfloat16"),
        (lambda given: {"x": given["x"].half()}, "x is torch.float16"),
        (lambda given: {"scales": (torch.ones(1, 256, 1), torch.ones(1, 128).bfloat16())}, r"scales\[1\] is torch.bf"),
        (lambda given: {"float8": ops.Float8("blockwise", torch.bfloat16)}, "scales and float8"),
        (lambda given: {"float8": ops.Float8()}, "float8 is Float8"),
        (lambda given: {"wire": "float8"}, "wire is 'float8'"),
        (lambda given: {"x_scales": torch.ones(3)}, "x is torch.bfloat16"),
        (lambda given: {"x": given["x"].to(torch.float8_e4m3fn)}, "x is torch.float8_e4m3fn"),
        (lambda given: {"x": given["x"].to(torch.float8_e4m3fn), "x_scales": torch.ones(2)}, "x_scales has shape"),
        (lambda given: BFLOAT | {"x_scales": torch.ones(3)}, "x_scales is given, scales is None"),
        (lambda given: {"x_scales": torch.ones(3), "shared": (given["x"], given["x"])}, "shared is given, x is float8"),
        (lambda given: BFLOAT | {"wire": "float8_e4m3fn"}, "wire is 'float8_e4m3fn'"),
        (lambda given: {"scales": tuple(s.to("meta") for s in given["scales"])}, r"scales\[0\] is meta, x is cpu"),
        (
            lambda given: {"x": given["x"].to(torch.float8_e4m3fn), "x_scales": torch.ones(3).to("meta")},
            "x_scales is meta, x is cpu",
        ),
        (lambda given: {"gate_up": given["gate_up"][:, :96], "down": given["down"][..., :48]}, "inner of 128"),
    ],
)
def test_mistakes_of_float8_experts_are_named(change, message: str):
    gate_up, down, *scales = (t[None] for t in random_expert(128, 128))
    given = {"x": torch.zeros(3, 128).bfloat16(), "gate_up": gate_up, "down": down, "scales": tuple(scales)}
    given |= change(given)
    with pytest.raises(ArgumentError, match=message):
        ops.moe_layer(choice=(torch.zeros(3, 1).long(), torch.ones(3, 1)), **given)


@pytest.mark.parametrize(
    ("scaling", "wire"),
    [("groups", None), ("rows", None), ("rows", "float8_e4m3fn"), ("tensor", None), ("one number", None)],
)
def test_tokens_in_float8(scaling: str, wire: str | None):
    """Scales per group, per row and per tensor; with results in bfloat16 and in float8 on the wire."""
    experts = [random_expert(256, 128) for _ in range(2)]
    gate_up, down, *scales = (torch.stack(each) for each in zip(*experts, strict=True))
    shape = {"groups": (2, 3, 2), "rows": (2, 3), "tensor": (), "one number": (1,)}[scaling]
    x, of_x = torch.randn(2, 3, 256).to(torch.float8_e4m3fn), 2.0 ** torch.randint(-3, 3, shape)
    chosen, weights = torch.randint(0, 2, (6, 2)), torch.rand(6, 2)
    given = x, (chosen, weights), gate_up, down
    y = ops.moe_layer(*given, scales=tuple(scales), x_scales=of_x, wire=wire, most=8)
    each = of_x.expand(2, 3, 2) if of_x.ndim != 2 else of_x[..., None].expand(2, 3, 2)
    plain = (x.double() * each.double().repeat_interleave(128, -1)).flatten(0, 1)
    assert y.dtype == torch.bfloat16 and y.shape == x.shape
    near(scaling, y.flatten(0, 1), wanted(plain, chosen, weights, experts))


@pytest.mark.parametrize("by_rows", [False, True])
def test_gradients_through_float8_weights(by_rows: bool):
    """Of tokens and their weights."""
    experts = [random_expert(256, 128, by_rows=by_rows) for _ in range(2)]
    gate_up, down, *scales = (torch.stack(each) for each in zip(*experts, strict=True))
    x, weights = torch.randn(5, 256).bfloat16().requires_grad_(), torch.rand(5, 2, requires_grad=True)
    chosen, grad = torch.tensor([[0, 1], [1, -1], [0, 0], [-1, -1], [1, 0]]), torch.randn(5, 256).bfloat16()
    y = ops.moe_layer(x, (chosen, weights), gate_up, down, scales=tuple(scales))
    near("y", y.detach(), wanted(x.detach(), chosen, weights.detach(), experts))
    plain = [(whole(up, of_up), whole(out, of_out)) for up, out, of_up, of_out in experts]
    leaves = [t.detach().double().requires_grad_() for t in (x, weights)]
    want = torch.autograd.grad(trained(*leaves[:1], chosen, leaves[1], plain, plain), leaves, grad.double())
    for name, got, one in zip(("of x", "of weights"), torch.autograd.grad(y, [x, weights], grad), want, strict=True):
        near(name, got, one, GRADIENTS)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_both_sums_of_a_tile_are_in_registers():
    """And that of 128 products as well."""
    said = ptxas(source(works.scaled_gated_program(0, 2048, 7168)))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
