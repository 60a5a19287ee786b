# SPDX-License-Identifier: MIT
"""A decode step of a model of transformers: all of its decoder layers as one launch.

The layers are a program of phases (decode_program.py), which `schedule="persistent"` fuses. Embedding, last norm and
head are the model's modules. All tensors stay where they are between calls, so a CUDA graph can replay them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilescale.backends import simulated_us
from tilescale.errors import ArgumentError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops import decode_expert_weights
from tilescale.ops.arguments import check_count, check_tensor
from tilescale.ops.decode_expert_weights import experts_of, inner_of, wrong_experts
from tilescale.ops.decode_experts import all_chosen
from tilescale.ops.decode_program import decode_layers
from tilescale.ops.decode_sizes import COLUMNS, DEPTH, FLOAT8, MOST, QUERIES, SPAN, LayerSizes
from tilescale.ops.decode_weights import ATTENTION, FORMS, LINEARS, RankWeights, form_of
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.group import group_name, rank_of, size_of, team_of
from tilescale.runtime.compile import compile as compile_program

MODELS = ("llama", "qwen3", *decode_expert_weights.MODELS)
"""Supported types of models, by the names of transformers."""

PARTS = ("config", "model", "lm_head")
"""Attributes of a causal language model of transformers."""

WIDTHS = (64, 128)
"""Supported features of a head."""

PAGES = (16, 32, 64, 128)
"""Supported tokens of a page."""

SCHEDULES = ("persistent", "sequential")
"""Schedules of the layers to choose from."""


class DecodeStep(nn.Module):
    """A decode step of Llama, Qwen3, Qwen3-MoE or Mixtral models of transformers, all layers in one launch. Collective.

    It has the key-value cache of `batch` sequences of at most `keys` tokens. `load` takes the cache of the model's
    prefill. A call takes the last token of each sequence and returns the logits of the next one, as the model does:

        step = ops.DecodeStep(model, batch=1, keys=1024)
        made = model(prompt, use_cache=True)
        step.load(made.past_key_values)
        logits = step(made.logits[:, -1].argmax(-1))

    With pages the cache is laid out as in serving engines: `block_table` names the pages of each sequence, in any
    order. At first they are those of one sequence after the other; write to it, between calls, for others.

    A CUDA graph may capture a call: the lengths of the sequences are on the device. Only calls check that the cache
    is not full; replays beyond it store nothing, and their logits are wrong. On several ranks each one has its
    heads and its part of the MLP, or of each expert; sums over the ranks are part of the launch.

    Args:
        model: a causal language model in bfloat16, the same on all ranks, or one whose linear layers already have this
            rank's part. Where they stay whole, their weights become views of those of the launch. The weights of all
            linear layers may be float8_e4m3fn, as transformers loads them: with scales of 128 x 128 weights or of each
            output, in `weight_scale_inv` or `weight_scale`. Activations are as precise as with bfloat16.
        batch: sequences, up to 16.
        keys: tokens of a sequence, at most; a multiple of 64, and of the page size.
        page_size: tokens of a page: 16, 32, 64 or 128; None for a cache without pages.
        pages: of the cache; None for as many as the sequences have.
        schedule: "persistent": one launch; "sequential": phases in order; None for the one that takes a layer less time
            in a simulation of the machine, which takes some seconds.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Attributes:
        lengths: (batch,), int32: cached tokens of each sequence.
        K, V: (layers, batch, this rank's key heads, keys, features): the cache; with pages (layers, pages, page size,
            this rank's key heads, features).
        block_table: (batch, keys / page size), int32: the pages of each sequence, where there are pages. Entries
            behind the page of the next token are not read.

    Raises:
        ArgumentError: an unsupported model or size; names it, and the supported ones.
    """

    lengths: torch.Tensor
    block_table: torch.Tensor
    K: torch.Tensor
    V: torch.Tensor
    X: torch.Tensor
    rotary: Any
    norm: Any
    head: Any
    angles: Any

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        keys: int,
        *,
        page_size: int | None = None,
        pages: int | None = None,
        schedule: str | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        name = group_name(group)
        if not all(hasattr(model, part) for part in PARTS):
            raise ArgumentError(
                f"model is {type(model).__name__}", hint=f"a causal language model of transformers: {', '.join(MODELS)}"
            )
        base: Any = model.model
        self.sizes = _paged(_sizes(model, batch, keys, size_of(name)), page_size, pages)
        self.weights = RankWeights(self.sizes, rank_of(name))
        self.embed, self.rotary, self.norm, self.head = base.embed_tokens, base.rotary_emb, base.norm, model.lm_head
        with torch.no_grad():
            known = self.weights.of(base.layers)
        machine = current_machine()
        chosen = _fastest(self.sizes, machine) if schedule is None else schedule
        func = decode_layers(self.sizes)
        self.kernel = compile_program(func, machine=machine, team=team_of(name), schedule=chosen)
        buffers = (parameter.buffer for parameter in self.kernel.program.parameters)
        for buffer in (buffer for buffer in buffers if buffer is not None):
            shape, dtype = tuple(map(int, buffer.shape)), getattr(torch, str(buffer.dtype))
            made = known.get(buffer.name)
            made = torch.zeros(shape, dtype=dtype, device=self.embed.weight.device) if made is None else made
            self.register_buffer(buffer.name, made, persistent=False)
        if page_size is not None:
            self.block_table.copy_(torch.arange(self.block_table.numel()).view_as(self.block_table) % self.sizes.pages)
        self.longest = 0

    def load(self, cache: Any, lengths: Sequence[int] | None = None) -> None:
        """Take keys and values from a cache of transformers.

        Args:
            cache: with `layers`, each with `keys` and `values` (batch, key heads, tokens, features); without layers it
                is empty.
            lengths: tokens of each sequence that count, from the first one on; None for all.

        Raises:
            ArgumentError: other layers, heads or sequences, too many tokens, or lengths of more than there are.
        """
        taken = self._tokens_of(cache.layers)
        found = [taken] * self.sizes.batch if lengths is None else torch.as_tensor(lengths).tolist()
        if not isinstance(found, list) or len(found) != self.sizes.batch:
            raise ArgumentError(f"lengths is {found}", hint=f"give one for each of {self.sizes.batch} sequences")
        for i, length in enumerate(found):
            check_count(f"lengths[{i}]", length, least=0)
            if length > taken:
                raise ArgumentError(f"lengths[{i}] is {length}, the cache has {taken} tokens", hint="as many at most")
        for number, layer in enumerate(cache.layers):
            for mine, given in (self.K[number], layer.keys), (self.V[number], layer.values):
                self._store(mine, self.weights.part(given, 1, self.sizes.groups))
        self.lengths.copy_(torch.tensor(found, dtype=torch.int32))
        self.longest = max(found)

    def _tokens_of(self, layers: Sequence[Any]) -> int:
        """Tokens of a cache. Raises ArgumentError unless its shapes are those of this step's."""
        s = self.sizes
        if len(layers) not in (0, s.layers):
            raise ArgumentError(f"the cache has {len(layers)} layers", hint=f"this step has {s.layers}")
        taken = layers[0].keys.shape[2] if layers else 0
        for given in (x for layer in layers for x in (layer.keys, layer.values)):
            if len(given) != s.batch or given.shape[2] > s.keys or given.shape[2] != taken:
                raise ArgumentError(
                    f"the cache has {len(given)} sequences of {given.shape[2]} tokens",
                    hint=f"this step has {s.batch} of at most {s.keys}, as many in each layer",
                )
            if given.shape[1] not in (s.groups, s.groups * s.devices) or given.shape[3] != s.width:
                raise ArgumentError(
                    f"the cache has {given.shape[1]} key heads of {given.shape[3]} features",
                    hint=f"this step has {s.groups * s.devices} of {s.width}",
                )
        return taken

    def _store(self, cache: torch.Tensor, given: torch.Tensor) -> None:
        """Cache the first keys or values of a layer, (batch, key heads, tokens, features)."""
        page = self.sizes.page
        if not page:
            cache[:, :, : given.shape[2]] = given
            return
        at = torch.arange(given.shape[2], device=cache.device)
        cache[self.block_table[:, at // page].long(), at % page] = given.transpose(1, 2)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits behind one token of each sequence, (batch, vocabulary); it is cached.

        Args:
            tokens: (batch,).

        Raises:
            ArgumentError: other tokens, or the cache is full.
            WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
        """
        check_tensor("tokens", tokens, 1, (torch.int32, torch.int64))
        if len(tokens) != self.sizes.batch or self.longest >= self.sizes.keys:
            raise ArgumentError(
                f"there are {len(tokens)} tokens behind {self.longest} cached ones",
                hint=f"give one for each of {self.sizes.batch} sequences of at most {self.sizes.keys}",
            )
        self.longest += 1
        x = self.embed(tokens)
        self.X.copy_(x)
        for mine, given in zip(self.angles, self.rotary(x[:, None], self.lengths[:, None]), strict=True):
            mine.copy_(given[:, 0, : mine.shape[1]])
        self.kernel(*self.buffers(recurse=False))
        self.lengths += 1
        return self.head(self.norm(self.X).to(x.dtype))

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        s = self.sizes
        return f"layers={s.layers}, batch={s.batch}, keys={s.keys}"


@functools.cache
def _fastest(sizes: LayerSizes, machine: Machine) -> str:
    """The schedule with the least simulated time of one layer whose cache is full."""
    func = decode_layers(replace(sizes, layers=1))
    full = {"lengths": torch.full((sizes.batch,), sizes.keys - 1, dtype=torch.int32), **all_chosen(sizes)}

    def time_us(schedule: str) -> float:
        program = compile_program(func, machine=machine, schedule=schedule).ir
        return simulated_us(program, machine=machine, assume=full)

    return min(SCHEDULES, key=time_us)


def _paged(sizes: LayerSizes, page_size: int | None, pages: int | None) -> LayerSizes:
    """The sizes with pages, if there are some. Raises ArgumentError for unsupported ones."""
    if page_size is None:
        return sizes
    if page_size not in PAGES or sizes.keys % page_size:
        raise ArgumentError(
            f"page_size is {page_size}, keys is {sizes.keys}", hint=f"supported: {PAGES}, and keys in whole pages"
        )
    pages = sizes.batch * (sizes.keys // page_size) if pages is None else pages
    check_count("pages", pages)
    return replace(sizes, page=page_size, pages=pages)


def _sizes(model: Any, batch: int, keys: int, size: int) -> LayerSizes:
    """Sizes of a model's layers on each of some ranks. Raises ArgumentError for unsupported ones."""
    config = model.config
    check_count("batch", batch)
    check_count("keys", keys)
    heads, groups, layers = config.num_attention_heads, config.num_key_value_heads, model.model.layers
    has_experts = config.model_type in decode_expert_weights.MODELS
    inner = inner_of(config) if has_experts else config.intermediate_size
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    windows = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if getattr(config, "sliding_window", None):
        windows.add("sliding_attention")
    wrong = [
        (config.model_type not in MODELS, f"the model is {config.model_type!r}", ", ".join(MODELS)),
        (model.dtype != torch.bfloat16, f"the model is {model.dtype}", "torch.bfloat16"),
        (config.hidden_act != "silu", f"hidden_act is {config.hidden_act!r}", "'silu'"),
        (biases, f"the model has {' and '.join(biases)}", "linear layers without bias"),
        (windows, f"layers are {', '.join(sorted(windows))}", "full_attention"),
        (batch > MOST, f"batch is {batch}", f"up to {MOST}"),
        (keys % SPAN, f"keys is {keys}", f"multiples of {SPAN}"),
        (width not in WIDTHS, f"heads have {width} features", f"{WIDTHS}"),
        (heads % groups or heads > groups * QUERIES, f"{heads} heads share {groups} heads of keys", "a multiple"),
        (groups % size, f"{size} ranks share {groups} heads of keys", "a multiple of the ranks"),
        (config.hidden_size % COLUMNS, f"hidden_size is {config.hidden_size}", f"multiples of {COLUMNS}"),
        (
            not has_experts and inner % (size * COLUMNS),
            f"intermediate_size is {inner}",
            f"multiples of {size * COLUMNS}",
        ),
        (heads // size * width % DEPTH, f"a rank has {heads // size} heads of {width}", f"multiples of {DEPTH}"),
        *(wrong_experts(layers, config, size) if has_experts else ()),
    ]
    form = form_of(layers, ATTENTION if has_experts else LINEARS)
    if isinstance(form, str):
        supported = "; ".join(f"{dtype} {kind}" for dtype, kind in FORMS)
        wrong.append((True, f"weights are {form}", supported))
    elif form[0] == FLOAT8:
        wrong.append((has_experts, "a layer of experts has float8 weights", "torch.bfloat16 with experts"))
        wrong.append((width != DEPTH, f"heads have {width} features", f"{DEPTH} with float8 weights"))
    for is_wrong, found, supported in wrong:
        if is_wrong:
            raise ArgumentError(found, hint=f"supported: {supported}")
    shares, norms = (heads // size, groups // size, width, inner // size), config.model_type in ("qwen3", "qwen3_moe")
    layout = *shares, keys, len(layers), config.rms_norm_eps, norms
    sizes = LayerSizes(batch, size, config.hidden_size, *layout, at_once(), *form)
    return replace(sizes, **experts_of(layers, config)) if has_experts else sizes
