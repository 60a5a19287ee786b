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
from tilescale.ops.arguments import check_count, check_tensor
from tilescale.ops.decode_program import decode_layers
from tilescale.ops.decode_sizes import COLUMNS, DEPTH, MOST, QUERIES, SPAN, LayerSizes
from tilescale.ops.group import group_name, rank_of, size_of, team_of
from tilescale.ops.products import at_once
from tilescale.runtime.compile import compile as compile_program

MODELS = ("llama", "qwen3")
"""Supported types of models, by the names of transformers."""

WIDTHS = (64, 128)
"""Supported features of a head."""

SCHEDULES = ("persistent", "sequential")
"""Schedules of the layers to choose from."""

WEIGHTS = {
    "Wqkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 0),
    "Wo": (("self_attn.o_proj",), 1),
    "Wup": (("mlp.gate_proj", "mlp.up_proj"), 0),
    "Wdown": (("mlp.down_proj",), 1),
}
"""Parameter of the program -> the linear layers that it has side by side, and the dimension that ranks split."""


class DecodeStep(nn.Module):
    """A decode step of Llama or Qwen3 models of transformers, with all decoder layers in one launch. Collective.

    It has the key-value cache of `batch` sequences of at most `keys` tokens. `load` takes the cache of the model's
    prefill. A call takes the last token of each sequence and returns the logits of the next one, as the model does:

        step = ops.DecodeStep(model, batch=1, keys=1024)
        made = model(prompt, use_cache=True)
        step.load(made.past_key_values)
        logits = step(made.logits[:, -1].argmax(-1))

    A CUDA graph may capture a call: the lengths of the sequences are on the device. Only calls check that the cache
    is not full; replays beyond it store nothing, and their logits are wrong. On several ranks each one has its
    heads and its part of the MLP; sums over the ranks are part of the launch.

    Args:
        model: a causal language model in bfloat16, the same on all ranks, or one whose linear layers already have this
            rank's part. Where they stay whole, their weights become views of those of the launch.
        batch: sequences, up to 16.
        keys: tokens of a sequence, at most; a multiple of 64.
        schedule: "persistent": one launch; "sequential": phases in order; None for the one that takes a layer less time
            in a simulation of the machine, which takes some seconds.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Attributes:
        lengths: (batch,), int32: cached tokens of each sequence.
        K, V: (layers, batch, this rank's key heads, keys, features): the cache.

    Raises:
        ArgumentError: an unsupported model or size; names it, and the supported ones.
    """

    lengths: torch.Tensor
    K: torch.Tensor
    V: torch.Tensor
    X: torch.Tensor
    rotary: Any
    norm: Any
    head: Any
    angles: Any

    def __init__(
        self, model: nn.Module, batch: int, keys: int, *, schedule: str | None = None, group: Any = None
    ) -> None:  # fmt: skip
        super().__init__()
        name = group_name(group)
        self.rank, self.size = rank_of(name), size_of(name)
        base: Any = model.model
        self.sizes = _sizes(model, batch, keys, self.size)
        self.embed, self.rotary, self.norm, self.head = base.embed_tokens, base.rotary_emb, base.norm, model.lm_head
        with torch.no_grad():
            known = self._weights(base.layers)
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
        self.longest = 0

    def load(self, cache: Any, lengths: Sequence[int] | None = None) -> None:
        """Take keys and values from a cache of transformers.

        Args:
            cache: with `layers`, each with `keys` and `values` (batch, key heads, tokens, features).
            lengths: tokens of each sequence that count, from the first one on; None for all.

        Raises:
            ArgumentError: other sequences, or too many tokens.
        """
        taken = 0
        for number, layer in enumerate(cache.layers):
            for mine, given in (self.K[number], layer.keys), (self.V[number], layer.values):
                taken = given.shape[2]
                if len(given) != self.sizes.batch or taken > self.sizes.keys:
                    raise ArgumentError(
                        f"the cache has {len(given)} sequences of {taken} tokens",
                        hint=f"this step has {self.sizes.batch} of at most {self.sizes.keys}",
                    )
                mine[:, :, :taken] = self._part(given, 1, self.sizes.groups)
        found = [taken] * self.sizes.batch if lengths is None else list(lengths)
        self.lengths.copy_(torch.tensor(found, dtype=torch.int32))
        self.longest = max(found)

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

    def _weights(self, layers: Any) -> dict[str, torch.Tensor]:
        """Weights of all layers, by the program's parameters."""
        found = {name: self._stacked(layers, *where) for name, where in WEIGHTS.items()}
        norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        for name, where in norms.items():
            found[name] = torch.stack([layer.get_submodule(where).weight for layer in layers]).float()
        if self.sizes.head_norms:
            each = [(layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight) for layer in layers]
            found["heads"] = torch.stack([torch.stack(pair) for pair in each]).float()
        return found

    def _stacked(self, layers: Any, names: Sequence[str], dim: int) -> torch.Tensor:
        """The weights of some linear layers of all decoder layers; whole ones become views of the result."""
        s = self.sizes
        extents = {"q_proj": s.heads * s.width, "o_proj": s.heads * s.width}
        extents |= {"k_proj": s.groups * s.width, "v_proj": s.groups * s.width}
        found: list[torch.Tensor] = []
        made = torch.empty(0)
        for number, layer in enumerate(layers):
            linears = [layer.get_submodule(name) for name in names]
            shares = [extents.get(name.rpartition(".")[2], s.inner) for name in names]
            found = [self._part(each.weight, dim, n) for each, n in zip(linears, shares, strict=True)]
            if not number:
                rows = sum(map(len, found))
                made = found[0].new_empty(len(layers), rows, found[0].shape[1])
            begins = [sum(map(len, found[:i])) for i in range(len(found))]
            for linear, part, begin in zip(linears, found, begins, strict=True):
                view = made[number, begin : begin + len(part)]
                view.copy_(part)
                if part.shape == linear.weight.shape:
                    linear.weight.data = view
        return made

    def _part(self, x: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """This rank's part of a tensor that is whole, or this part already."""
        return x if x.shape[dim] == extent else x.chunk(self.size, dim)[self.rank]

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        s = self.sizes
        return f"layers={s.layers}, batch={s.batch}, keys={s.keys}"


@functools.cache
def _fastest(sizes: LayerSizes, machine: Machine) -> str:
    """The schedule with the least simulated time of one layer whose cache is full."""
    func = decode_layers(replace(sizes, layers=1))
    full = {"lengths": torch.full((sizes.batch,), sizes.keys - 1, dtype=torch.int32)}

    def time_us(schedule: str) -> float:
        program = compile_program(func, machine=machine, schedule=schedule).ir
        return simulated_us(program, machine=machine, assume=full)

    return min(SCHEDULES, key=time_us)


def _sizes(model: Any, batch: int, keys: int, size: int) -> LayerSizes:
    """Sizes of a model's layers on each of some ranks. Raises ArgumentError for unsupported ones."""
    config = model.config
    check_count("batch", batch)
    check_count("keys", keys)
    heads, groups, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    windows = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
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
        (inner % (size * COLUMNS), f"intermediate_size is {inner}", f"multiples of {size * COLUMNS}"),
        (heads // size * width % DEPTH, f"a rank has {heads // size} heads of {width}", f"multiples of {DEPTH}"),
    ]
    for is_wrong, found, supported in wrong:
        if is_wrong:
            raise ArgumentError(found, hint=f"supported: {supported}")
    shares = heads // size, groups // size, width, inner // size
    has_norms = config.model_type == "qwen3"
    layers, epsilon = config.num_hidden_layers, config.rms_norm_eps
    return LayerSizes(batch, size, config.hidden_size, *shares, keys, layers, epsilon, has_norms, at_once())
