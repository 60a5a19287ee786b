# SPDX-License-Identifier: MIT
"""A plan of torch.distributed.tensor.parallel, applied with the layers of linear.py where they support it.

Such a plan gives the placement of each module's inputs and outputs over the ranks. Its linear layers become
`ColumnParallelLinear` and `RowParallelLinear`; a gather that the plan puts in front of a block moves into the first
layers of the block, one for all of them; PyTorch applies the rest of the plan.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import SUMS, check_flags
from tilescale.ops.dtensors import is_dtensor
from tilescale.ops.early_kernels import begin_compiling
from tilescale.ops.float8 import Float8
from tilescale.ops.group import group_name
from tilescale.ops.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    check_shard,
)
from tilescale.ops.partial_gradients import sum_partial_gradients
from tilescale.ops.siblings import gather_once, lay_side_by_side
from tilescale.ops.token_wise import work_on_shards

TOKENS = (1, -2)
"""Dimensions of (batch, tokens, features) by which the tokens may be split over the ranks."""


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    float8: Float8 | None = None,
    keep_gathered: bool = False,
) -> nn.Module:
    """Parallelise a model as `torch.distributed.tensor.parallel.parallelize_module` does, in place, by the same plan.

    Args:
        module: the model. The data type of its computation has to be supported: bfloat16 or float16 parameters, or
            float32 ones under torch.autocast or under FSDP2's `MixedPrecisionPolicy(param_dtype=...)`.
        device_mesh: a DeviceMesh of one dimension; None is the current one, `with mesh:`.
        parallelize_plan: a module's name -> ParallelStyle; names may have wildcards. Or the style of the module itself.
        src_data_rank: the rank of the mesh whose parameters all take; None if they are alike already.
        float8: how the GEMMs of TileScale's layers are rounded to float8, `Float8()`; the computation is in bfloat16
            then.
        keep_gathered: whether gathered tokens are kept for the backward pass: a gather less for each block, for
            ranks times the memory of its input. Compiled graphs always keep them, as PyTorch's do.

    Returns:
        The model. A `ColwiseParallel` linear layer whose output stays sharded, and a `RowwiseParallel` one, become
        TileScale's. If tokens are split over the ranks, their number may be any where the layers that give them return
        DTensors, `use_local_output=False`: `generate` of transformers has one token in a step. Other linear layers
        become PyTorch's: a UserWarning names them and the reason. So do warnings of names that no module has, and of
        parameters that were tied and no longer are, as they lie differently over the ranks. The kernels of its layers
        begin to compile, in other processes, where weights are on a GPU, but for those in float32.

    Raises:
        ArgumentError: a layer's features cannot be split among the ranks, or PyTorch cannot shard a module of its type;
            or no module, no mesh, or one of several dimensions, or a plan of something else.

    After any error, of a style as well, the model is unchanged: its whole parameters are kept until this returns.
    """
    mesh = _current_mesh() if device_mesh is None else device_mesh
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {type(module).__name__}", hint="pass a torch.nn.Module")
    if getattr(mesh, "ndim", None) != 1:
        raise ArgumentError(
            f"device_mesh is {mesh}", hint='pass a DeviceMesh of one dimension, or a slice of one, such as mesh["tp"]'
        )
    from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
    from torch.distributed.tensor.parallel import parallelize_module as by_torch

    if parallelize_plan is None:
        return by_torch(module, mesh)  # which says that it does nothing
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    for name, style in plan.items():
        if not isinstance(style, ParallelStyle):
            where = f"parallelize_plan[{name!r}]" if plan is parallelize_plan else "parallelize_plan"
            raise ArgumentError(f"{where} is {type(style).__name__}", hint="give a ParallelStyle, or names with theirs")
    check_flags(keep_gathered=keep_gathered)
    styles, unresolved = _by_module(module, plan)
    gathers = _moved_gathers(module, styles)
    shards = _shards(module, styles, gathers)
    for name, shard in shards.items():
        check_shard(shard.kind, module.get_submodule(name), mesh, src_data_rank)
    how: dict[str, Any] = {"float8": float8, "src_data_rank": src_data_rank, "keep_gathered": keep_gathered}
    with _unchanged_by_failure(module):
        tied = _tied_parameters(module)
        _shard_layers(module, shards, mesh, how)
        kept = {name: style for name, style in styles.items() if name not in shards}
        left: dict[str, Any] = kept | unresolved | {name: _without_gather(styles[name]) for name in gathers}
        if "" in left:  # in a plan with others PyTorch takes no rank for it
            by_torch(module, mesh, left.pop(""), src_data_rank=src_data_rank)
        made = by_torch(module, mesh, left, src_data_rank=src_data_rank)
        for name, style in styles.items():
            if type(style) is SequenceParallel:
                work_on_shards(module.get_submodule(name))
        _sum_partial_gradients(module, styles, group_name(mesh))
        _tie_again(module, tied)
        begin_compiling(made)
    return made


def _current_mesh() -> Any:
    """The mesh of the innermost `with mesh:`; None outside of any."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


def _by_module(module: nn.Module, plan: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The style of each module that the plan names, and the plan's entries that name none: PyTorch warns of them."""
    found: dict[str, Any] = {}
    unresolved = {}
    for pattern, style in plan.items():
        words = pattern.split(".")
        parts = {name: name.split(".") for name, _ in module.named_modules()}
        names = [name for name, own in parts.items() if len(own) == len(words) and all(map(fnmatch, own, words))]
        found |= dict.fromkeys(names, style)
        if not names:
            unresolved[pattern] = style
    return found, unresolved


@dataclass(frozen=True)
class _Shard:
    """TileScale's layer that implements a style.

    Attributes:
        sequence: whether the tokens are split over the ranks outside of it.
        block: the name of the module whose gather moves into it, if there is one.
        local_output: as of the layer.
    """

    kind: type[ParallelLinear]
    sequence: bool
    block: str | None = None
    local_output: bool = True


def _shards(module: nn.Module, styles: Mapping[str, Any], gathers: set[str]) -> dict[str, _Shard]:
    """The layers that become ours. Warns of linear layers that become PyTorch's.

    Raises ArgumentError for a module that PyTorch cannot shard.
    """
    made, others = {}, defaultdict(list)
    for name, style in styles.items():
        if not _is_linear_style(style):
            continue
        layer, block = module.get_submodule(name), next((g for g in gathers if _is_inside(name, g)), None)
        shard = _shard(layer, style, block)
        if isinstance(shard, _Shard):
            made[name] = shard
        elif isinstance(layer, nn.Linear):
            others[shard].append(name)
        elif not isinstance(layer, nn.Embedding) and _is_own_style(style):
            raise ArgumentError(
                f"parallelize_plan names {name!r}, which is {type(layer).__module__}.{type(layer).__name__}",
                hint="supported: torch.nn.Linear, torch.nn.Embedding and their subclasses: leave it out of the plan",
            )
    for reason, names in others.items():
        warnings.warn(f"layers {names} become PyTorch's, without overlap: {reason}", stacklevel=3)
    return made


def _shard(layer: nn.Module, style: Any, block: str | None) -> _Shard | str:
    """Our layer for a style, or the reason why it has to be PyTorch's."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    if type(layer) is not nn.Linear:
        return f"{type(layer).__name__} is not torch.nn.Linear itself; change layers after parallelize_module"
    if layer.weight.dtype not in SUMS:
        return f"weights are {layer.weight.dtype}; supported: {', '.join(map(str, SUMS))}"
    column = isinstance(style, ColwiseParallel)
    inside, outside = style.input_layouts[0], style.output_layouts[0]
    if not style.use_local_output and (column or not _is_tokens(outside)):
        return "use_local_output is False"
    if column:
        inside, outside = outside, Shard(1) if block is not None else inside
    if inside != Shard(-1):
        return f"{'output' if column else 'input'}_layouts is {inside}; supported: Shard(-1)"
    if not _is_tokens(outside) and outside != Replicate():
        return f"{'input' if column else 'output'}_layouts is {outside}; supported: Shard(1), Shard(-2), Replicate()"
    kind = ColumnParallelLinear if column else RowParallelLinear
    return _Shard(kind, _is_tokens(outside), block, style.use_local_output)


def _shard_layers(module: nn.Module, shards: Mapping[str, _Shard], mesh: Any, how: dict[str, Any]) -> None:
    """Make the layers, and let those with one input share its gather or GEMM."""
    siblings: dict[Any, list[ColumnParallelLinear]] = defaultdict(list)
    for name, shard in shards.items():
        made = shard.kind.shard(module.get_submodule(name), mesh, **how, sequence=shard.sequence)  # type: ignore[arg-type]
        made.local_output, made.gathers_dtensors_only = shard.local_output, shard.block is not None
        if shard.kind is ColumnParallelLinear and (shard.block is not None or not shard.sequence):
            # Layers that get all tokens are assumed to be siblings with one input, until a call shows otherwise.
            single = name.rpartition(".")[0], made.bias is None
            alike = made.in_features, made.weight.dtype, made.weight.device
            siblings[shard.block if shard.sequence else single, alike].append(made)
    for layers in siblings.values():
        gather_once(*layers)
        lay_side_by_side(*layers)


def _sum_partial_gradients(module: nn.Module, styles: Mapping[str, Any], group: str) -> None:
    """In blocks: in the smallest modules that have a column-parallel and a row-parallel layer."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    linear = {n: s for n, s in styles.items() if _is_linear_style(s) and isinstance(module.get_submodule(n), nn.Linear)}
    columns = [n for n, s in linear.items() if isinstance(s, ColwiseParallel) and s.output_layouts[0] == Shard(-1)]
    blocks = defaultdict(list)
    for name, style in linear.items():
        if not isinstance(style, ColwiseParallel) and style.input_layouts[0] == Shard(-1):
            words = name.split(".")
            around = [".".join(words[:i]) for i in reversed(range(len(words)))]
            for block in [each for each in around if any(_is_inside(column, each) for column in columns)][:1]:
                blocks[block].append(module.get_submodule(name))
    for block, rows in blocks.items():
        sum_partial_gradients(module.get_submodule(block), rows, group)


def _is_linear_style(style: Any) -> bool:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return isinstance(style, ColwiseParallel | RowwiseParallel)


def _is_own_style(style: Any) -> bool:
    """Whether a style is a class of PyTorch, whose shardings are known, not a subclass."""
    return _is_linear_style(style) and type(style).__module__.startswith("torch.")


def _tied_parameters(module: nn.Module) -> list[list[str]]:
    names = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _tie_again(module: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters that lie alike over the ranks, as before the plan. Warns of others."""
    for names in tied:
        first, *others = (module.get_parameter(name) for name in names)
        if all(_lies_like(other, first) for other in others):
            for name in names:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, first)
        else:
            warnings.warn(
                f"parameters {names} were tied, and are now trained apart: they lie differently over the ranks. A "
                "vocabulary is split alike by RowwiseParallel of the embedding and ColwiseParallel of the linear layer",
                stacklevel=3,
            )


def _lies_like(x: Any, other: Any) -> bool:
    """Whether both are one parameter, or may be."""
    split = is_dtensor(x) and is_dtensor(other)
    return x is other or (split and (x.device_mesh, x.placements) == (other.device_mesh, other.placements))


def _moved_gathers(module: nn.Module, styles: Mapping[str, Any]) -> set[str]:
    """The blocks whose gather moves into their column-parallel layers. Warns of others whose gather could."""
    found = {name for name, style in styles.items() if _gathers(style) and _feeds_columns(name, module, styles)}
    local = sorted(name for name in found if styles[name].use_local_output)
    if local:
        reason = "use_local_output is True, so other layers may take the gathered tokens"
        warnings.warn(f"the gathers of {local} stay PyTorch's, without overlap: {reason}", stacklevel=3)
    return found - set(local)


def _gathers(style: Any) -> bool:
    """Whether a style gathers the tokens of one of a block's inputs, and does nothing else."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import PrepareModuleInput

    if not isinstance(style, PrepareModuleInput):
        return False
    pairs = list(zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True))
    wanted = style.desired_input_kwarg_layouts
    pairs += [(given, wanted.get(name)) for name, given in style.input_kwarg_layouts.items()]
    changed = [(given, wanted) for given, wanted in pairs if given != wanted]
    return len(changed) == 1 and _is_tokens(changed[0][0]) and changed[0][1] == Replicate()


def _feeds_columns(block: str, module: nn.Module, styles: Mapping[str, Any]) -> bool:
    """Whether all column-parallel layers of a block can gather without the block's style."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    inside = {n: s for n, s in styles.items() if _is_inside(n, block) and isinstance(s, ColwiseParallel)}
    return bool(inside) and all(
        isinstance(_shard(module.get_submodule(n), s, block), _Shard) for n, s in inside.items()
    )


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.") if block else name != ""


def _without_gather(style: Any) -> Any:
    """The style with the placement of the block's input unchanged."""
    from torch.distributed.tensor.parallel import PrepareModuleInput

    of_names = style.input_kwarg_layouts if style.with_kwargs else None
    return PrepareModuleInput(
        input_layouts=style.input_layouts,
        desired_input_layouts=style.input_layouts,
        input_kwarg_layouts=of_names,
        desired_input_kwarg_layouts=of_names,
    )


def _is_tokens(placement: Any) -> bool:
    from torch.distributed.tensor import Shard

    return isinstance(placement, Shard) and placement.dim in TOKENS


@contextmanager
def _unchanged_by_failure(module: nn.Module) -> Iterator[None]:
    """If the body raises, leave the module and those in it as they were: their classes, parameters, hooks and
    attributes. Their tensors are kept meanwhile."""
    before = [(each, type(each), _held(vars(each))) for each in module.modules()]
    try:
        yield
    except BaseException:
        for each, kind, held in before:
            each.__class__ = kind
            for table, items in held:
                table.clear()
                table.update(items)
        raise


def _held(state: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """A module's attributes and its tables, each with its items. Handles of hooks refer to the tables themselves."""
    return [(table, dict(table)) for table in (state, *(x for x in state.values() if isinstance(x, dict)))]
