# SPDX-License-Identifier: MIT
"""Tasks of the products of a decode step, compared with all possible cuts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tilescale.ops.decode_sizes import DEPTH, FLOAT8, MADE, PHASE, SLAB, SPAN, STEPS, LayerSizes, Made, Parts, divisors


def busiest(tasks: int, blocks: int) -> int:
    """Tasks of the block that has most of them."""
    return -(-tasks // blocks)


@pytest.mark.parametrize(
    ("blocks", "tasks", "count", "items"), [(8, 2, 8, 2), (8, 3, 8, 4), (8, 9, 4, 4), (8, 1, 6, 1)]
)
def test_a_task_has_the_fewest_items_with_which_each_block_has_one_task(
    blocks: int, tasks: int, count: int, items: int
):
    assert LayerSizes(blocks=blocks).each(tasks, count) == items


def test_a_task_of_sequences_has_those_of_the_batch():
    assert LayerSizes(batch=12, blocks=8).each(2) == 3


@pytest.mark.parametrize("weights", ["bfloat16", FLOAT8])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("blocks", [16, 132])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (6144, 4096), (4096, 14336), (128, 2048)])
def test_the_busiest_block_loads_the_fewest_weights(weights: str, batch: int, blocks: int, outputs: int, inputs: int):
    sizes = LayerSizes(batch=batch, blocks=blocks, weights=weights)
    tiles, steps = outputs // sizes.tile_rows, inputs // DEPTH

    def loaded(parts: int) -> int:
        """Steps of K of the busiest block."""
        tasks, _ = sizes.tasks(outputs, parts)
        return busiest(tasks * parts, blocks) * tiles // tasks * steps // parts

    allowed = [n for n in divisors(steps) if n <= blocks and sizes.rows * sizes.nbytes * inputs // n <= SLAB]
    fewest = [n for n in allowed if loaded(n) == min(map(loaded, allowed))]
    long = [n for n in fewest if steps // n >= STEPS]
    assert sizes.able(outputs, inputs) == (long or fewest[:1]), "long tasks, where there are some"


@pytest.mark.parametrize("changes", [{}, {"batch": 4}, {"weights": FLOAT8}, {"heads": 16, "groups": 4, "inner": 7168}])
def test_parts_of_products_are_those_with_the_fewest_bytes_of_results(changes: dict[str, Any]):
    sizes = LayerSizes(**changes)
    values = sizes.heads * sizes.width
    products = (sizes.projected, 4096), (4096, values), (2 * sizes.inner, 4096), (4096, sizes.inner)
    able = [Parts(*parts) for parts in itertools.product(*(sizes.able(*product) for product in products))]
    assert sizes.parts in able and len(able) > 8
    assert sizes.moved(sizes.parts) == min(map(sizes.moved, able))


@pytest.mark.parametrize(("blocks", "inner"), [(132, 14336), (132, 768), (16, 768), (7, 96), (4, 2048)])
def test_a_task_of_experts_has_a_multiple_of_16_outputs_up_to_64(blocks: int, inner: int):
    sizes = LayerSizes(blocks=blocks, inner=inner, batch=2, experts=8, choices=2)

    def outputs(gated: int) -> int:
        return busiest(sizes.slots * inner // gated, blocks) * gated

    able = [n for n in range(16, 65, 16) if inner % n == 0]
    assert sizes.gated == max(n for n in able if outputs(n) == min(map(outputs, able)))


@pytest.mark.parametrize("batch", [1, 5, 16])
def test_tasks_of_attention_have_all_keys(batch: int):
    sizes = LayerSizes(batch=batch, keys=1024)
    assert sizes.spans * sizes.tiles * SPAN == 1024


@pytest.mark.parametrize(
    ("batch", "keys", "blocks", "more"), [(1, 1024, 132, 0), (1, 1024, 136, 1), (1, 512, 132, 1), (2, 512, 128, 0)]
)
def test_a_new_token_has_a_task_of_its_own_where_a_block_is_left(batch: int, keys: int, blocks: int, more: int):
    sizes = LayerSizes(batch=batch, keys=keys, blocks=blocks)
    assert sizes.attends == sizes.spans + more


def test_slots_are_experts_that_are_chosen_at_most():
    assert [LayerSizes(batch=b, experts=8, choices=2).slots for b in (1, 4, 16)] == [2, 8, 8]


@pytest.mark.parametrize(
    ("blocks", "choices", "parts"), [(132, 8, 2), (132, 1, 1), (640, 8, 8), (16, 8, 1), (64, 8, 1)]
)
def test_the_second_product_of_experts_leaves_each_block_a_task(blocks: int, choices: int, parts: int):
    assert LayerSizes(blocks=blocks, experts=64, choices=choices).down_parts == parts


def test_products_have_the_fewest_parts_where_phases_make_activations():
    sizes = LayerSizes(batch=16)
    assert not any(sizes.made)
    assert sizes.parts == (4, 2, 2, 8)
    assert sizes.parts.up == min(sizes.able(2 * sizes.inner, sizes.hidden)) < max(sizes.able(2 * sizes.inner, 4096))


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({}, Made(True, True, True, True)),
        ({"weights": FLOAT8}, Made(True, True, True, True)),
        ({"width": DEPTH // 2, "heads": 64}, Made(True, False, True, True)),
        ({"batch": 2}, Made(True, False, True, True)),
        ({"batch": 4}, Made(True, False, True, False)),
        ({"batch": 16}, Made(False, False, False, False)),
        ({"devices": 2, "heads": 16, "groups": 4, "inner": 7168}, Made(True, True, True, True)),
        ({"devices": 8, "heads": 4, "groups": 1, "inner": 1792, "batch": 16}, Made(False, False, False, False)),
        ({"hidden": 2048, "inner": 768, "experts": 64, "choices": 8}, Made(True, True, False, False)),
    ],
)
def test_tasks_make_activations_of_few_numbers(changes: dict[str, Any], made: Made):
    """Attention's, where a head is as wide as a step of K; those of experts are stored. Sums of many devices' parts are
    a phase: then each device sends one sum."""
    assert LayerSizes(**changes).made == made


def test_a_task_that_makes_its_activations_reads_their_parts():
    """Two parts and the residual stream of 2 sequences, a half of 4096 features; a phase reads them once for all."""
    here, apart = LayerSizes(batch=2)._input(3, 4096, 2)
    assert here == 3 * 2 * 2048 * 4
    assert apart == PHASE + 3 * 128 * 4 + 2 * 2048 * 2


def test_a_task_makes_activations_of_few_steps_of_all_sequences():
    sizes = LayerSizes(batch=4, blocks=2)
    assert sizes._input(1, MADE // 4 * DEPTH, 1)[0] == 4 * 4 * MADE // 4 * DEPTH
    assert sizes._input(1, (MADE // 4 + 1) * DEPTH, 1)[0] == float("inf")


def test_shapes_of_what_a_layer_has_not_are_one_number():
    plain, paged = LayerSizes(layers=2, batch=3), LayerSizes(layers=2, batch=3, page=64, pages=40, weights=FLOAT8)
    assert plain.cache == (2, 3, 8, 1024, 128) and plain.table == (1, 1)
    assert plain.scales(4096, 14336) == (1, 1, 1) and plain.factors(4096) == (1, 1)
    assert paged.cache == (2, 40, 64, 8, 128) and paged.table == (3, 16)
    assert paged.scales(4096, 14336) == (2, 32, 112) and paged.factors(4096) == (32, 3)
    assert LayerSizes(layers=2, weights=FLOAT8, squares=False).scales(4096, 14336) == (2, 4096, 1)


def test_queries_keys_and_values_are_projected_together():
    assert LayerSizes(heads=6, groups=2, width=64).projected == 6 * 64 + 2 * 64 + 2 * 64


def test_rows_are_multiples_of_eight_and_columns_of_the_router_of_tiles():
    assert [LayerSizes(batch=b, weights=w).rows for b, w in ((1, "bfloat16"), (9, "bfloat16"), (5, FLOAT8))] == [
        8,
        16,
        16,
    ]
    assert [LayerSizes(experts=e).scores for e in (0, 1, 64, 65)] == [0, 64, 64, 128]
