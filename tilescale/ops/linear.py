# SPDX-License-Identifier: MIT
"""Linear layers whose weights are split over the ranks of a group, by tensor parallelism (Megatron-LM).

Between layers the tokens are split over the ranks (sequence parallelism, arXiv:2205.05198), so a column-parallel layer
begins with a gather, and a row-parallel one ends with a reduce-scatter; both are overlapped with the GEMM.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import SUMS, as_autocast, check_like, check_tensor, dense
from tilescale.ops.dtensors import brought, is_dtensor, local_tensor, split_over
from tilescale.ops.few_rows import few_rows_gemms
from tilescale.ops.float8 import Float8, spelled, times
from tilescale.ops.group import collective, group_name, is_mesh, rank_of, size_of
from tilescale.ops.layer_gemms import column_parallel, parts_side_by_side, row_parallel, side_by_side
from tilescale.ops.operator import differentiates
from tilescale.ops.replicated import used_in_parts

if TYPE_CHECKING:
    from tilescale.ops.siblings import SiblingResults

TOKENS, FEATURES = -2, -1
"""The dimensions that are split over the ranks between layers, and inside of a pair of them."""


class ParallelLinear(nn.Linear):
    """Common base of both layers. Make one of an existing layer with `shard`.

    Where tokens are split over the ranks, the result of several sequences is not contiguous: tokens are outermost in
    memory, so take `reshape`, not `view`, to join both dimensions.

    Attributes:
        group: the name of the group whose ranks share the weight.
        sequence: whether the tokens are split over the ranks outside of the pair of layers; else every rank has them
            all.
        float8: how GEMMs are rounded to float8; None for those of the weight's type.
        keep_gathered: whether a column-parallel layer keeps the gathered tokens for its backward pass.
        local_output: whether a row-parallel layer's result is this rank's part; else a DTensor, whose tokens need not
            be a multiple of the ranks.
    """

    group: str
    sequence: bool
    float8: Float8 | None
    keep_gathered: bool
    local_output: bool
    cut: int

    def __init__(self, *given: Any, **named: Any):
        kind = type(self).__name__
        raise ArgumentError(
            f"{kind} is not made from sizes", hint=f"make it from a layer: {kind}.shard(torch.nn.Linear(...), group)"
        )

    @classmethod
    def shard(
        cls,
        linear: nn.Linear,
        group: Any = None,
        *,
        sequence: bool = True,
        float8: Float8 | None = None,
        src_data_rank: int | None = None,
        keep_gathered: bool = False,
    ) -> Any:
        """Turn a layer, which all ranks have alike, into this rank's part of it, in place.

        Args:
            linear: a torch.nn.Linear; its parameters become this rank's shards.
            group: a process group, a slice of a DeviceMesh, or None for all ranks of the job. With a mesh parameters
                become DTensors, as PyTorch's own plans make them: optimisers, norms of gradients and checkpoints see
                whole tensors.
            sequence: whether the tokens are split over the ranks outside of the pair of layers.
            float8: how GEMMs are rounded to float8, `Float8()`, of a layer in bfloat16; None for no rounding.
            src_data_rank: the rank of the mesh whose parameters all take, as for
                `torch.distributed.tensor.distribute_tensor`; None if they are alike already: each takes its own.
            keep_gathered: whether a column-parallel layer keeps the gathered tokens for its backward pass, ranks times
                the memory of its input; else they are gathered again, but in compiled graphs.

        Returns:
            The layer itself, of its new class.

        Raises:
            ArgumentError: it is not a torch.nn.Linear, or its features cannot be split among the ranks; or
                src_data_rank without a mesh.
        """
        check_shard(cls, linear, group, src_data_rank)
        linear.weight = _part(linear.weight, cls.cut, group, src_data_rank)
        linear.out_features, linear.in_features = local_tensor(linear.weight).shape
        if linear.bias is not None:
            linear.bias = _part(linear.bias, None if cls.cut else 0, group, src_data_rank)
        return cls.adopt(linear, group, sequence, float8, keep_gathered)

    @classmethod
    def adopt(
        cls, linear: nn.Linear, group: Any, sequence: bool, float8: Float8 | None = None, keep_gathered: bool = False
    ) -> Any:
        """`shard` for a layer whose features are this rank's, and whose parameters are, or will be, their parts."""
        _refuse_adapters(ParallelLinear)
        linear.__class__ = cls
        linear.group, linear.sequence = group_name(group), sequence  # type: ignore[assignment]
        linear.float8, linear.keep_gathered = float8, keep_gathered  # type: ignore[assignment]
        linear.local_output = True  # type: ignore[assignment]
        return linear

    def _given(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """This rank's part of the input, which is split along a dimension over the ranks; None: it is replicated.

        Raises ArgumentError unless it has tokens, features of this layer, and the type of its weight.
        """
        (x,) = as_autocast(brought("x", x, dim, self.group, uneven=dim == TOKENS))
        check_tensor("x", x, served=SUMS)
        check_like("x", x, "weight", self.operands()[0])
        if x.ndim < (-TOKENS if self.sequence else 1) or x.shape[-1] != self.in_features:
            raise ArgumentError(
                f"x has shape {tuple(x.shape)}", hint=f"the layer takes (..., tokens, {self.in_features})"
            )
        return x

    def parts(self) -> list[Any]:
        """This rank's part of the weight, and of the bias."""
        return as_autocast(local_tensor(self.weight), local_tensor(self.bias))

    def operands(self) -> list[Any]:
        """The weight and bias for operators, which take a DTensor as its shard."""
        given = [self.weight, self.bias]
        return self.parts() if torch.is_autocast_enabled(self.weight.device.type) else given

    def extra_repr(self) -> str:
        """The shard's features, whether tokens are split over the ranks, and the rounding."""
        rounds = "" if self.float8 is None else f", float8={self.float8.scaling}"
        return f"{super().extra_repr()}, sequence={self.sequence}{rounds}"


class ColumnParallelLinear(ParallelLinear):
    """A linear layer of which each rank has some of the outputs.

    It takes (..., tokens / ranks, in_features) if the tokens are split over the ranks, else (..., tokens, in_features),
    and gives (..., tokens, out_features / ranks). A DTensor may have any number of tokens: the last parts are padded.
    Several layers with one input share the gather: see `gather_once`.
    """

    cut = 0
    gathers_dtensors_only = False
    """Whether a plain tensor has all tokens, though they are split over the ranks: a plan gathers it before."""
    _siblings: SiblingResults | None = None

    @collective
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs for all tokens.

        Raises:
            ArgumentError: the input has other features.
        """
        if self._siblings is not None:
            return self._siblings.result(self, x)
        return self.outputs(x, [self])[0]

    def outputs(self, x: torch.Tensor, layers: list[ColumnParallelLinear]) -> list[torch.Tensor]:
        """Outputs of layers with one input, this one among them. Raises as a call of this one."""
        if self.sequence and (is_dtensor(x) or not self.gathers_dtensors_only):
            part = self._given(x, TOKENS)
            tokens = x.shape[TOKENS] if is_dtensor(x) else size_of(self.group) * part.shape[TOKENS]
            each = -(-tokens // size_of(self.group))
            given, every = _padded(part, each), each * size_of(self.group)
            return [_first(_as_tokens(y, given, every), tokens) for y in _gathered(_token_rows(given), layers)]
        given = self._given(x, None)
        given = given if is_dtensor(x) else used_in_parts(given, self.group)
        if len(layers) == 1:
            weight, bias = self.parts()
            return [_times(given, weight, bias, self.float8)]
        weights, biases = _operands(layers)
        if differentiates([given, *weights, *biases]) and not torch.compiler.is_compiling():
            return parts_side_by_side(given, weights, biases)
        if not (biases or side_by_side.is_seen) and given.is_cuda:
            apart = few_rows_gemms(dense(given.reshape(-1, given.shape[-1])), list(map(local_tensor, weights)))
            if apart is not None:
                return [y.view(*given.shape[:-1], -1) for y in apart]
        made, widths = side_by_side(given, weights, biases), [layer.out_features for layer in layers]
        # One by one: autograd forbids in-place changes of views that are made at once.
        return [made.narrow(-1, sum(widths[:i]), width) for i, width in enumerate(widths)]


class RowParallelLinear(ParallelLinear):
    """A linear layer of which each rank has some of the inputs.

    It takes (..., tokens, in_features / ranks), and gives (..., tokens / ranks, out_features) if the tokens are split
    over the ranks, else (..., tokens, out_features) on every rank. The bias is the same on all ranks.
    """

    cut = 1

    @collective
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks: of this rank's tokens, or of all.

        Raises:
            ArgumentError: the input has other features, or tokens that cannot be split among the ranks.
        """
        x, (weight, bias), size = self._given(x, FEATURES), self.operands(), size_of(self.group)
        if not self.sequence:
            return row_parallel(x, weight, bias, self.group, False, spelled(self.float8))
        tokens, each = x.shape[TOKENS], -(-x.shape[TOKENS] // size)
        if self.local_output and tokens % size:
            raise ArgumentError(
                f"x has {tokens} tokens, the group has {size} ranks",
                hint=f"pad them to a multiple of {size}; or give DTensors: use_local_output=False in the plan",
            )
        given = _padded(x, each * size)
        rows = row_parallel(_token_rows(given), weight, bias, self.group, True, spelled(self.float8))
        made = _as_tokens(rows, given, each)
        if torch.compiler.is_compiling():
            made = made.contiguous()  # the compiler joins the copy with what follows, and blocks share one graph
        if self.local_output:
            return made
        own = min(max(tokens - each * rank_of(self.group), 0), each)
        mesh = self.weight.device_mesh  # type: ignore[attr-defined] # a DTensor
        return split_over(_first(made, own), mesh, TOKENS, tokens)


def check_shard(kind: type[ParallelLinear], linear: nn.Module, group: Any, src_data_rank: int | None) -> None:
    """Raise what `kind.shard` raises for these arguments; the layer is unchanged."""
    if not isinstance(linear, nn.Linear) or isinstance(linear, ParallelLinear):
        raise ArgumentError(f"linear is {type(linear).__name__}", hint="pass a torch.nn.Linear, whole on each rank")
    if src_data_rank is not None and not is_mesh(group):
        raise ArgumentError(f"src_data_rank is {src_data_rank}, group no mesh", hint="pass a slice of a DeviceMesh")
    size = size_of(group_name(group))
    extent = linear.weight.shape[kind.cut]
    if extent % size or not linear.weight.numel():
        raise ArgumentError(
            f"linear has {extent} {'output' if kind.cut == 0 else 'input'} features, the group has {size} ranks",
            hint=f"supported: multiples of {size}",
        )


def _part(whole: torch.Tensor, cut: int | None, group: Any, source: int | None) -> nn.Parameter:
    """This rank's part of a parameter, cut along a dimension or whole (None); if there is a mesh, as a DTensor.

    `source`: the rank in the mesh whose parameter is used; None: the local one, without communication.
    """
    if is_mesh(group):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placements = [Replicate() if cut is None else Shard(cut)]
        part: torch.Tensor = distribute_tensor(whole.detach(), group, placements, src_data_rank=source)
    else:
        name = group_name(group)
        part = whole.detach() if cut is None else whole.detach().chunk(size_of(name), cut)[rank_of(name)].clone()
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Float8 | None) -> torch.Tensor:
    """The layer of this rank alone."""
    if recipe is None:
        return nn.functional.linear(x, weight, bias)
    y = times(x.reshape(-1, x.shape[-1]), weight.t(), bias, spelled(recipe))
    return y.view(*x.shape[:-1], weight.shape[0])


def _gathered(x: torch.Tensor, layers: list[ColumnParallelLinear]) -> list[torch.Tensor]:
    """The layers' outputs for the tokens of all ranks."""
    weights, biases = _operands(layers)
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    # PyTorch recomputes no operators in a backward graph: it would gather again in the forward graph, and keep that.
    keeps = trains and (layers[0].keep_gathered or torch.compiler.is_compiling())
    made = column_parallel(x, weights, biases, layers[0].group, spelled(layers[0].float8), keeps)
    return made[: len(layers)]


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., tokens, features) as rows, those of a token together: then a rank's rows are contiguous among those of all
    ranks. It is a copy unless memory has that order, and the tensor itself if there is one sequence."""
    return x if x.shape[:TOKENS].numel() == 1 else x.movedim(TOKENS, 0).flatten(0, TOKENS)


def _as_tokens(rows: torch.Tensor, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The inverse, for a result of the rows of a tensor, with other tokens: a view with the tensor's dimensions."""
    if rows.ndim == x.ndim:
        return rows
    return rows.view(tokens, *x.shape[:TOKENS], rows.shape[1]).movedim(0, TOKENS)


def _padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """(..., tokens, features) with zeros behind it."""
    return x if x.shape[TOKENS] == tokens else nn.functional.pad(x, (0, 0, 0, tokens - x.shape[TOKENS]))


def _first(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x if x.shape[TOKENS] == tokens else x.narrow(TOKENS, 0, tokens)


def _operands(layers: list[ColumnParallelLinear]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights, and a bias each, of zeros where others have one; or none."""
    weights, biases = zip(*[layer.operands() for layer in layers], strict=True)
    if any(bias is not None for bias in biases):
        pairs = zip(weights, biases, strict=True)
        biases = tuple(w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in pairs)
    return list(weights), [bias for bias in biases if bias is not None]


@cache
def _refuse_adapters(kind: type[nn.Module]) -> None:
    """Let modules of PEFT, such as LoRA, raise ArgumentError, in this process, when they become adapters of layers of a
    kind.

    An adapter takes the shard for the whole layer. It would add to each rank's part of a sum, and each rank would train
    another adapter, in silence.
    """

    def refuse(parent: nn.Module, name: str, module: Any) -> None:
        if isinstance(module, kind) and name == "base_layer" and type(parent).__module__.startswith("peft."):
            raise ArgumentError(
                f"an adapter of PEFT, {type(parent).__name__}, around a layer that is split over the ranks",
                hint="leave the layer out of the adapter's target_modules or of the plan",
            )

    # Compiled autograd makes modules while PyTorch's compiler watches for frames, and would trace this one of a module
    # that is half made. The mark of torch.compiler.disable, without loading the compiler in each process.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        refuse.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    )
    register_module_module_registration_hook(refuse)
