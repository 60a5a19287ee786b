# SPDX-License-Identifier: MIT
"""A decode step of models of transformers as one launch: the logits of the model, token after token."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
from tests.persistent.conftest import FEW
from tests.persistent.float8_linear import to_float8
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.hda import Machine
from tilescale.ops import decode_expert_weights
from tilescale.ops.decode_sizes import LayerSizes
from tilescale.ops.decode_step import _fastest
from tilescale.settings import settings

transformers = pytest.importorskip("transformers")

KINDS = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}
KINDS |= {"qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), "mixtral": ("MixtralConfig", "MixtralForCausalLM")}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
CHANGES = {"qwen3_moe": EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True}, "mixtral": EXPERTS}
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 128, "num_hidden_layers": 2, "vocab_size": 48, "initializer_range": 0.1}


def model_of(kind: str, **changes: Any) -> Any:
    config, model = (getattr(transformers, name) for name in KINDS[kind])
    torch.manual_seed(0)
    made = model(config(**(SIZES | CHANGES.get(kind, {}) | changes))).bfloat16().eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


@pytest.fixture
def few_blocks(small: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank on such a machine, without GPUs."""
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    monkeypatch.setenv("TILESCALE_CHECK", "none")
    settings.cache_clear()
    with tilescale.use_machine(small):
        yield
    settings.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "squares", "page_size"),
    [("llama", None, None), ("qwen3", None, 16), ("llama", True, None), ("qwen3", False, 32)],
    ids=["llama", "qwen3 with pages", "float8", "float8 with scales of rows and pages"],
)
def test_logits_are_the_models(kind: str, squares: bool | None, page_size: int | None, few_blocks: None):
    """They are as close to those of the model in float32 as the model's own in bfloat16."""
    model, exact = (model_of(kind) if squares is None else to_float8(model_of(kind), squares) for _ in range(2))
    in_float32(exact)
    tokens = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(1))
    made, wide = (m(tokens[:, :5], use_cache=True).past_key_values for m in (model, exact))
    pages = None if page_size is None else 128 // page_size + 1
    step = ops.DecodeStep(model, 2, 64, page_size=page_size, pages=pages, schedule="persistent")
    if pages is not None:
        step.block_table.copy_(torch.arange(pages - 1, 0, -1).view_as(step.block_table))
    step.load(made)
    for place in range(5, 8):
        given = tokens[:, place : place + 1]
        found = step(given[:, 0])
        low, want = (m(given, past_key_values=c).logits[:, 0] for m, c in ((model, made), (exact, wide)))
        assert (found - want).norm() < 1.2 * (low - want).norm()
    assert step.lengths.tolist() == [8, 8]


def in_float32(model: Any) -> None:
    """Convert everything but float8 weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@torch.no_grad()
def test_weights_of_the_model_are_those_of_the_launch(few_blocks: None):
    """A model needs no second copy of them, and prefills as before."""
    model, same = model_of("llama"), model_of("llama")
    step = ops.DecodeStep(model, 1, 64, schedule="persistent")
    tokens = torch.arange(6)[None]
    assert model(tokens).logits.equal(same(tokens).logits)
    model.model.layers[1].mlp.up_proj.weight.zero_()
    assert not step.Wup[1, 128:].any() and step.Wup[1, :128].any()


@torch.no_grad()
def test_experts_of_the_model_are_those_of_the_launch(few_blocks: None):
    model, same = model_of("mixtral"), model_of("mixtral")
    step = ops.DecodeStep(model, 1, 64, schedule="sequential")
    tokens = torch.arange(6)[None]
    assert model(tokens).logits.equal(same(tokens).logits)
    model.model.layers[1].mlp.experts.down_proj[3].zero_()
    assert not step.Wdown[1, 3].any() and step.Wdown[1, 2].any()


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_has_its_features_of_whole_experts(rank: int):
    """Of the gate, of the rows behind it, and of the columns of the second product."""
    gate_up, down = torch.arange(2 * 12 * 5).view(2, 12, 5), torch.arange(2 * 5 * 6).view(2, 5, 6)
    wanted = (gate_up, (2, 4, 5)), (down, (2, 5, 2))
    mine = [decode_expert_weights._part(x, torch.empty(shape), rank) for x, shape in wanted]
    begin, end = 2 * rank, 2 * rank + 2
    assert mine[0].equal(torch.cat([gate_up[:, begin:end], gate_up[:, 6 + begin : 6 + end]], 1))
    assert mine[1].equal(down[..., begin:end])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, "layer 1 has no experts"),
        ({"num_local_experts": 257}, "there are 257 experts"),
        ({"moe_intermediate_size": 96}, "experts have 96 features"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "layers are sliding_attention"),
    ],
)
def test_unsupported_experts_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(ArgumentError, match=message):
        ops.DecodeStep(model_of("qwen3_moe", **changes), 1, 64)


@pytest.mark.parametrize(
    ("changes", "batch", "keys", "message"),
    [
        ({}, 17, 64, "batch is 17"),
        ({}, 1, 100, "keys is 100"),
        ({"hidden_size": 192}, 1, 64, "hidden_size is 192"),
        ({"head_dim": 32}, 1, 64, "heads have 32 features"),
        ({"attention_bias": True}, 1, 64, "the model has attention_bias"),
        ({"hidden_act": "gelu"}, 1, 64, "hidden_act is 'gelu'"),
    ],
)
def test_unsupported_models_are_named(changes: dict[str, Any], batch: int, keys: int, message: str):
    with pytest.raises(ArgumentError, match=message):
        ops.DecodeStep(model_of("llama", **changes), batch, keys)


def test_what_is_no_language_model_is_named():
    for model in torch.nn.Linear(8, 8), model_of("llama").model:
        with pytest.raises(ArgumentError, match=f"model is {type(model).__name__}"):
            ops.DecodeStep(model, 1, 64)


@torch.no_grad()
def test_caches_and_lengths_that_do_not_fit_are_errors(few_blocks: None):
    """And change nothing; a cache without layers is empty."""
    model = model_of("llama")
    step = ops.DecodeStep(model, 2, 64, schedule="sequential")
    made, other = (
        m(torch.arange(10).view(2, 5), use_cache=True).past_key_values
        for m in (model, model_of("llama", num_key_value_heads=2))
    )
    step.load(made, [3, 5])
    for cache, lengths, message in (
        (made, [3, 6], r"lengths\[1\] is 6, the cache has 5 tokens"),
        (made, [3, -1], r"lengths\[1\] is -1"),
        (made, [3], r"lengths is \[3\]"),
        (made, 3, "lengths is 3"),
        (SimpleNamespace(layers=made.layers[:1]), None, "the cache has 1 layers"),
        (SimpleNamespace(layers=made.layers * 2), None, "the cache has 4 layers"),
        (other, None, "the cache has 2 key heads of 128 features"),
    ):
        with pytest.raises(ArgumentError, match=message):
            step.load(cache, lengths)
    assert (step.lengths.tolist(), step.longest) == ([3, 5], 5)
    step.load(transformers.DynamicCache())
    assert (step.lengths.tolist(), step.longest) == ([0, 0], 0)


def test_a_full_cache_is_an_error(few_blocks: None):
    step = ops.DecodeStep(model_of("llama"), 1, 64, schedule="sequential")
    step.longest = 64
    with pytest.raises(ArgumentError, match="behind 64 cached ones"):
        step(torch.zeros(1, dtype=torch.int64))


@torch.no_grad()
@pytest.mark.parametrize("schedule", ["sequential", "persistent"])
def test_a_full_sequence_leaves_the_pages_of_others(schedule: str, few_blocks: None):
    """Replays of a graph go on without the host, which would raise an error."""
    step = ops.DecodeStep(model_of("llama"), 2, 64, page_size=16, schedule=schedule)
    step.lengths.copy_(torch.tensor([3, 64]))
    before = step.K.clone()
    step(torch.tensor([1, 2]))
    changed = (step.K != before).any(-1).nonzero()
    assert changed.tolist() == [[layer, 0, 3, 0] for layer in range(2)]


@pytest.mark.parametrize(("batch", "blocks", "chosen"), [(1, FEW, "persistent"), (16, 132, "sequential")])
def test_the_faster_schedule_is_chosen(batch: int, blocks: int, chosen: str, small: Machine):
    """An SM executes several blocks of a grid at once, but one of a launch: many small tasks take it longer."""
    sizes = LayerSizes(batch, 1, 256, 2, 1, 128, 128, 64, blocks=blocks)
    assert _fastest(sizes, small) == chosen
