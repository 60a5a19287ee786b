# SPDX-License-Identifier: MIT
"""Decoder layers with experts in a decode step, in order and as one launch: the results of a reference in PyTorch."""

import re

import pytest
import torch

import tilescale
from tests.persistent.conftest import FEW
from tests.persistent.test_decode_layers import arguments, compare
from tilescale.hda import Machine
from tilescale.ops.decode_program import decode_layers
from tilescale.ops.decode_sizes import LayerSizes
from tilescale.passes.persistent.rewrite import persistent

SMALL = {"hidden": 256, "heads": 2, "groups": 1, "inner": 64, "keys": 64, "blocks": FEW}

SIZES = {
    "one launch": (LayerSizes(1, 2, experts=8, choices=2, **SMALL), True),
    "many experts, three sequences": (LayerSizes(3, 1, experts=70, choices=8, normalizes=False, **SMALL), False),
    "all slots, two layers": (LayerSizes(4, 1, experts=6, choices=2, layers=2, **SMALL), True),
    "sixteen sequences on four devices": (LayerSizes(16, 4, experts=16, choices=1, **SMALL), False),
}


@pytest.mark.parametrize(("sizes", "fused"), SIZES.values(), ids=SIZES)
def test_layers_are_the_reference(sizes: LayerSizes, fused: bool, small: Machine):
    func = decode_layers(sizes)
    compare(sizes, persistent(func, small)[0] if fused else func, arguments(sizes), small)


@pytest.mark.parametrize("fused", [False, True], ids=["in order", "one launch"])
@pytest.mark.parametrize("loved", [None, 5], ids=["ties", "one expert"])
def test_all_tokens_take_the_same_experts(loved: int | None, fused: bool, small: Machine):
    """Of equal logits the first ones count; without races."""
    sizes = LayerSizes(2, 1, experts=8, choices=2 if loved is None else 1, **SMALL)
    given = arguments(sizes)
    router = given[0]["router"]
    router.zero_()
    if loved is not None:
        router[:, loved] = torch.randn(sizes.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
        router[:, loved - 1] = -router[:, loved]
    func = decode_layers(sizes)
    compare(sizes, persistent(func, small)[0] if fused else func, given, small, check="all")


def test_tasks_of_experts_fill_the_blocks():
    """Slots of a Qwen3-MoE layer: the busiest block loads hardly more weights than the mean."""
    of_one = LayerSizes(1, hidden=2048, inner=768, experts=128, choices=8)
    assert (of_one.slots, of_one.gated, of_one.down_parts) == (8, 48, 4)
    assert LayerSizes(8, hidden=2048, inner=768, experts=64, choices=8).slots == 64


def test_the_ring_of_weights_leaves_space_for_tiles_of_experts():
    """All stages of tiles count whose place in memory follows from the table of experts."""
    sizes = LayerSizes(1, 1, hidden=2048, heads=32, groups=4, inner=768, experts=128, choices=8)
    kernel = tilescale.compile(decode_layers(sizes), machine=Machine.load("h200-sxm-8"), schedule="persistent")
    (ring,) = re.findall(r"ring = T.alloc\(\((\d+), 64, 128\)", kernel.python)
    tiles = 6 * (16 + 2 * sizes.gated) * 64 * 2
    assert int(ring) * 64 * 128 * 2 + tiles < 227 << 10
