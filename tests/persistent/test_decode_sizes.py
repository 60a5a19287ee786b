# SPDX-License-Identifier: MIT
"""Tasks of the products of a decode step, compared with all possible cuts."""

from __future__ import annotations

import pytest

from tilescale.ops.decode_sizes import DEPTH, FLOAT8, SLAB, SPAN, LayerSizes, divisors


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

    parts = sizes.parts(outputs, inputs)
    able = [n for n in divisors(steps) if n <= blocks and sizes.rows * sizes.nbytes * inputs // n <= SLAB]
    assert parts in able and loaded(parts) == min(map(loaded, able))
    assert all(loaded(n) > loaded(parts) for n in able if n < parts), "the fewest parts"


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


def test_slots_are_experts_that_are_chosen_at_most():
    assert [LayerSizes(batch=b, experts=8, choices=2).slots for b in (1, 4, 16)] == [2, 8, 8]


@pytest.mark.parametrize(
    ("blocks", "choices", "parts"), [(132, 8, 2), (132, 1, 1), (640, 8, 8), (16, 8, 1), (64, 8, 1)]
)
def test_the_second_product_of_experts_leaves_each_block_a_task(blocks: int, choices: int, parts: int):
    assert LayerSizes(blocks=blocks, experts=64, choices=choices).down_parts == parts


@pytest.mark.parametrize(
    ("batch", "width", "early"), [(1, DEPTH, False), (2, DEPTH, True), (1, DEPTH // 2, True), (4, DEPTH // 2, True)]
)
def test_attention_is_combined_by_tasks_of_one_sequence_whose_heads_are_a_step_wide(
    batch: int, width: int, early: bool
):
    assert LayerSizes(batch=batch, width=width).combines_early == early


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
