# SPDX-License-Identifier: MIT
"""Decoder layers in a decode step, in order and as one launch: the results of a reference in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import tilescale
from tests.cuda.support import lowered, source
from tests.persistent.conftest import FEW
from tilescale.hda import Machine
from tilescale.ops import decode_sizes
from tilescale.ops.decode_program import decode_layers
from tilescale.ops.decode_sizes import DEPTH, FLOAT8, LayerSizes
from tilescale.passes.persistent.rewrite import persistent

EPS = 1e-5

SMALL = {"hidden": 256, "heads": 2, "groups": 1, "inner": 128, "blocks": FEW}


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """(sequences, heads, width), the two halves turned by angles."""
    (cos, sin), (a, b) = angles[:, :, None], x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def arguments(sizes: LayerSizes) -> list[dict[str, torch.Tensor]]:
    """Tensors of each device by name, workspaces apart; what all devices have is the same."""
    s, common = sizes, torch.Generator().manual_seed(0)
    n, values = s.batch, s.heads * s.width
    at = torch.randint(0, s.keys, (n,), generator=common, dtype=torch.int32)
    at[0] = s.keys - 1
    turns = at[:, None] * 1e4 ** (-torch.arange(0, s.width, 2) / s.width)
    same = {
        "X": torch.randn(n, s.hidden, generator=common),
        "norm1": torch.rand(s.layers, s.hidden, generator=common) + 0.5,
        "norm2": torch.rand(s.layers, s.hidden, generator=common) + 0.5,
        "heads": torch.rand(s.layers, 2, s.width, generator=common) + 0.5,
        "lengths": at,
        "angles": torch.stack([turns.cos(), turns.sin()]),
    }
    shapes = {"Wqkv": (s.projected, s.hidden), "Wo": (s.hidden, values)}
    each = (s.experts,) if s.experts else ()
    shapes |= {"Wup": (*each, 2 * s.inner, s.hidden), "Wdown": (*each, s.hidden, s.inner)}
    if s.experts:
        same["router"] = torch.zeros(s.layers, s.scores, s.hidden, dtype=torch.bfloat16)
        same["router"][:, : s.experts] = torch.randn(s.layers, s.experts, s.hidden, generator=common) * s.hidden**-0.5
    if s.page:
        same["block_table"] = torch.randperm(s.pages, generator=common, dtype=torch.int32)[: n * s.table[1]].view(
            s.table
        )
    cache = (s.layers, n, s.groups, s.keys, s.width)
    found = []
    for rank in range(s.devices):
        own = torch.Generator().manual_seed(1 + rank)
        weights = {k: torch.randn(s.layers, *v, generator=own) * v[-1] ** -0.5 for k, v in shapes.items()}
        scales = {} if s.weights == "bfloat16" else {f"of_{name}": rounded(s, name, weights) for name in shapes}
        caches = {name: torch.randn(cache, generator=own) for name in "KV"}
        low = {name: value.bfloat16() for name, value in caches.items()}
        low |= {name: value.to(getattr(torch, s.weights)) for name, value in weights.items()}
        found.append({name: value.clone() for name, value in (same | low | scales).items()})
    return found


def rounded(sizes: LayerSizes, name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scales of a layer's weights, which are divided by them, such that the largest one is the type's."""
    layers, outputs, inputs = sizes.scales(*weights[name].shape[1:])
    tiles = weights[name].view(layers, outputs, -1, inputs, weights[name].shape[2] // inputs)
    scales = tiles.abs().amax((2, 4), keepdim=True) / 448
    weights[name] = (tiles / scales).view(weights[name].shape)
    return scales.view(layers, outputs, inputs)


def wide(t: dict[str, torch.Tensor], name: str, layer: int) -> torch.Tensor:
    """A layer's weights as float32."""
    weights = t[name][layer].float()
    if f"of_{name}" not in t:
        return weights
    scales = t[f"of_{name}"][layer]
    for dim in (0, 1):
        scales = scales.repeat_interleave(weights.shape[dim] // scales.shape[dim], dim)
    return weights * scales


def in_pages(sizes: LayerSizes, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the cache in pages, if there are some."""
    s = sizes
    if not s.page:
        return t
    found = {}
    for name in "KV":
        found[name] = torch.zeros(s.cache, dtype=torch.bfloat16)
        parts = t[name].view(s.layers, s.batch, s.groups, -1, s.page, s.width)
        found[name][:, t["block_table"].long()] = parts.permute(0, 1, 3, 4, 2, 5)
    return t | found


def reference(sizes: LayerSizes, ranks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The residual stream behind the layers, in float32; caches are updated."""
    s, rows = sizes, torch.arange(sizes.batch)
    x, at, angles = (ranks[0][name] for name in ("X", "lengths", "angles"))
    for layer in range(s.layers):
        h = rms_norm(x, (s.hidden,), eps=EPS) * ranks[0]["norm1"][layer]
        for t in ranks:
            parts = (h @ wide(t, "Wqkv", layer).T).view(s.batch, -1, s.width).split([s.heads, s.groups, s.groups], 1)
            given = parts[:2]
            if s.head_norms:
                norms = zip(given, ranks[0]["heads"][layer], strict=True)
                given = [rms_norm(part, (s.width,), weight, EPS) for part, weight in norms]
            q, k = (rotated(part, angles) for part in given)
            t["K"][layer, rows, :, at], t["V"][layer, rows, :, at] = k.bfloat16(), parts[2].bfloat16()
            keys, cached = t["K"][layer].float(), t["V"][layer].float()
            mask = (torch.arange(s.keys) <= at[:, None])[:, None, None]
            o = scaled_dot_product_attention(q[:, :, None], keys, cached, attn_mask=mask, enable_gqa=True)
            x = x + o.reshape(s.batch, -1) @ wide(t, "Wo", layer).T
        h = rms_norm(x, (s.hidden,), eps=EPS) * ranks[0]["norm2"][layer]
        for t in ranks:
            x = x + (experts if s.experts else mlp)(s, t, layer, h)
    return x


def mlp(s: LayerSizes, t: dict[str, torch.Tensor], layer: int, h: torch.Tensor) -> torch.Tensor:
    """Results of a rank's part of the MLP for normalized rows."""
    gate, up = (h @ wide(t, "Wup", layer).T).chunk(2, 1)
    return (silu(gate) * up) @ wide(t, "Wdown", layer).T


def experts(s: LayerSizes, t: dict[str, torch.Tensor], layer: int, h: torch.Tensor) -> torch.Tensor:
    """The same with experts: of equal logits, those of the lowest numbers."""
    share = (h @ t["router"][layer, : s.experts].float().T).softmax(-1)
    best = share.sort(stable=True, dim=-1, descending=True)[1][:, : s.choices]
    share = torch.zeros_like(share).scatter(1, best, share.gather(1, best))
    share = share / share.sum(-1, keepdim=True) if s.normalizes else share
    gate, up = torch.einsum("nh,eih->nei", h, t["Wup"][layer].float()).chunk(2, -1)
    return torch.einsum("nei,ehi,ne->nh", silu(gate) * up, t["Wdown"][layer].float(), share)


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [
        (LayerSizes(1, 2, keys=128, **SMALL), True),
        (LayerSizes(6, 1, keys=128, layers=2, head_norms=True, **SMALL), False),
        (LayerSizes(16, 2, keys=1024, **SMALL), False),
        (LayerSizes(2, 1, keys=128, layers=2, page=16, pages=20, **SMALL), True),
        (LayerSizes(16, 2, keys=1024, page=128, pages=130, **SMALL), False),
        (LayerSizes(1, 2, keys=128, layers=2, weights=FLOAT8, **SMALL), True),
        (LayerSizes(4, 1, keys=128, weights=FLOAT8, squares=False, head_norms=True, **SMALL), True),
    ],
    ids=[
        "one launch",
        "six sequences on one device",
        "several tiles of keys",
        "pages",
        "several tiles of keys in pages",
        "float8",
        "float8 with scales of rows",
    ],  # fmt: skip
)
def test_layers_are_the_reference(sizes: LayerSizes, fused: bool, small: Machine):
    with tilescale.use_machine(small):
        func = decode_layers(sizes)
    compare(sizes, persistent(func, small)[0] if fused else func, arguments(sizes), small)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"page": 16, "pages": 20}, marks=pytest.mark.nightly),
        {"experts": 8, "choices": 2},
        pytest.param({"weights": FLOAT8, "squares": False}, marks=pytest.mark.nightly),
    ],
    ids=["plain", "pages", "experts", "float8 with scales of rows"],
)
def test_a_launch_has_a_lowering(form: dict[str, Any]):
    """The emulator lowers a launch only where it is in doubt about a tile."""
    machine = Machine.load("h200-sxm-8")
    with tilescale.use_machine(machine):
        func = decode_layers(LayerSizes(1, 1, keys=128, **form, **SMALL))
    lowered(persistent(func, machine)[0]).check_tiles()


def test_tasks_make_activations_of_several_parts(small: Machine):
    """Each of one part of K, of two sequences and two terms; without races."""
    big = {"hidden": 1024, "heads": 8, "groups": 1, "inner": 1024, "keys": 64, "blocks": 12}
    sizes = LayerSizes(2, 2, weights=FLOAT8, **big)
    assert all(sizes.made) and min(sizes.parts) > 1
    compare(sizes, persistent(decode_layers(sizes), small)[0], arguments(sizes), small, check="all")


def test_an_odd_number_of_sequences_is_lowered_in_order(small: Machine):
    """The rows of the activations of a task are an odd number too: in doubt about them the programs are lowered."""
    sizes = LayerSizes(3, 1, keys=64, weights=FLOAT8, **SMALL)
    assert all(sizes.made)
    compare(sizes, decode_layers(sizes), arguments(sizes), small, check="all")


@pytest.mark.parametrize("form", [{}, {"weights": FLOAT8}], ids=["plain", "float8"])
def test_phases_make_activations_of_many_numbers(
    form: dict[str, Any], small: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode_sizes, "MADE", 0)
    sizes = LayerSizes(4, 2, keys=128, **form, **SMALL)
    assert not any(sizes.made)
    compare(sizes, persistent(decode_layers(sizes), small)[0], arguments(sizes), small)


def compare(
    sizes: LayerSizes, func: Any, want: list[dict[str, torch.Tensor]], machine: Machine, check: str = "none"
) -> None:
    """Results of a program for these tensors are those of the reference."""
    given = [in_pages(sizes, {name: value.clone() for name, value in t.items()}) for t in want]
    args = [
        [
            t.get(buffer.name, torch.zeros(tuple(map(int, buffer.shape)), dtype=getattr(torch, str(buffer.dtype))))
            for p in func.params
            for buffer in [func.buffer_map[p]]
        ]
        for t in given
    ]
    tilescale.emulate(func, args, machine=machine, time=False, check=check)
    x = reference(sizes, want)
    added = (x - want[0]["X"]).pow(2).mean().sqrt()
    for rank, tensors in enumerate(args):
        assert (tensors[0] - x).abs().max() < 2**-4 * added
        for name in "KV":
            error = given[rank][name].float() - in_pages(sizes, want[rank])[name].float()
            assert error.abs().max() < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "form", [{}, {"page": 16, "pages": 1024}, {"weights": FLOAT8}], ids=["plain", "pages", "float8"]
)
def test_sixteen_sequences_compile(form: dict[str, Any]):
    """Their tasks of attention have several tiles of keys, which go through the ring of weights where they can."""
    machine = Machine.load("h200-sxm-8")
    with tilescale.use_machine(machine):
        func = decode_layers(LayerSizes(16, **form))
    assert ("cp_async_wait" if form else "K_desc") in source(persistent(func, machine)[0])


@pytest.mark.parametrize(("blocks", "has_ring"), [(2, True), (3, False)])
def test_keys_go_through_the_ring_if_blocks_have_as_many_loads(blocks: int, has_ring: bool, tmp_path: Path):
    """Of several tiles for each task; without races."""
    path = tmp_path / "few.yaml"
    path.write_text(f"extends: h200-sxm-8\ntitle: few\nlevels: {{block: {{count: {blocks}}}}}\n", encoding="utf-8")
    machine = Machine.load(path)
    sizes = LayerSizes(4, 2, keys=192, layers=2, **{**SMALL, "blocks": blocks})
    assert sizes.tiles > 1
    func, _ = persistent(decode_layers(sizes), machine)
    assert ("tma_copy(T.region(K" in func.script()) == has_ring
    compare(sizes, func, arguments(sizes), machine, check="all")


def test_parts_of_an_indivisible_number_of_steps():
    """More steps than blocks, and a prime number of them: each is a part, as activations of all of them do not fit."""
    steps = 137
    assert LayerSizes(batch=16, inner=steps * DEPTH).able(4096, steps * DEPTH) == [steps]
