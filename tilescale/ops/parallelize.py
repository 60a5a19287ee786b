# SPDX-License-Identifier: MIT
"""A plan of torch.distributed.tensor.parallel, carried out with the layers of linear.py where they serve.

Such a plan says for each module how its inputs and outputs lie over the ranks. Its linear layers become
`ColumnParallelLinear` and `RowParallelLinear`; a gather that the plan puts in front of a block moves into the first
layers of the block, one for all of them; whatever else the plan says, PyTorch does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import PRODUCTS
from tilescale.ops.float8 import Float8
from tilescale.ops.linear import ColumnParallelLinear, RowParallelLinear, gather_once
from tilescale.ops.token_wise import work_on_shards

TOKENS = (1, -2)
"""Ways to say along which dimension of (batch, tokens, features) the tokens lie over the ranks."""


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    float8: Float8 | None = None,
) -> nn.Module:
    """Parallelise a model as `torch.distributed.tensor.parallel.parallelize_module` does, in place, by the same plan.

    Args:
        module: the model, in bfloat16 or float16.
        device_mesh: a DeviceMesh of one dimension; None is the current one, `with mesh:`.
        parallelize_plan: a module's name -> ParallelStyle; names may have wildcards. Or the style of the module itself.
        src_data_rank: the rank of the mesh whose parameters all take; None if they are alike already.
        float8: how the products of TileScale's layers are rounded to float8, `Float8()`; the model is in bfloat16 then.

    Returns:
        The model. A `ColwiseParallel` linear layer whose output stays sharded, and a `RowwiseParallel` one, are
        TileScale's; the others, and layers whose inputs lie in other ways, are PyTorch's. Those of another type are,
        too, and names that no module has do nothing: a UserWarning says so.

    Raises:
        ArgumentError: a layer's features cannot be split among the ranks; or no module, no mesh, or one of several
            dimensions, or a plan of something else.
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
    styles, unresolved = _by_module(module, plan)
    _warn_of_types({name: module.get_submodule(name) for name in styles})
    gathers = {name for name, style in styles.items() if _gathers(style) and _feeds_columns(name, module, styles)}
    left: dict[str, Any] = {name: _without_gather(styles[name]) for name in gathers} | unresolved
    blocks: dict[str, list[ColumnParallelLinear]] = {}
    for name, style in styles.items():
        layer, block = module.get_submodule(name), next((g for g in gathers if _is_inside(name, g)), None)
        kind = _kind(layer, style, is_gathered=block is not None)
        if kind is None:
            left.setdefault(name, style)
            continue
        parallel, sequence = kind
        made = parallel.shard(layer, mesh, sequence=sequence, float8=float8, src_data_rank=src_data_rank)
        if block is not None and parallel is ColumnParallelLinear:
            blocks.setdefault(block, []).append(made)
    for layers in blocks.values():
        gather_once(*layers)
    if "" in left:  # in a plan with others PyTorch takes no rank for it
        by_torch(module, mesh, left.pop(""), src_data_rank=src_data_rank)
    made = by_torch(module, mesh, left, src_data_rank=src_data_rank)
    for name, style in styles.items():
        if type(style) is SequenceParallel:
            work_on_shards(module.get_submodule(name))
    return made


def _current_mesh() -> Any:
    """That of the innermost `with mesh:`; None outside of any."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


def _by_module(module: nn.Module, plan: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The style of each module that the plan names, and what of the plan names none: PyTorch warns of it."""
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


def _warn_of_types(layers: Mapping[str, nn.Module]) -> None:
    """Tell of linear layers that stay PyTorch's for their type alone."""
    wide = {name: layer.weight.dtype for name, layer in layers.items() if type(layer) is nn.Linear}
    wide = {name: dtype for name, dtype in wide.items() if dtype not in PRODUCTS}
    if wide:
        dtypes = ", ".join(sorted(map(str, set(wide.values()))))
        warnings.warn(
            f"layers {list(wide)} are {dtypes}: PyTorch's own take their place. Convert the model before it is "
            "parallelised, model.bfloat16(), for layers whose communication is hidden",
            stacklevel=3,
        )


def _kind(layer: nn.Module, style: Any, *, is_gathered: bool) -> tuple[Any, bool] | None:
    """Which of our layers does what a style says, and whether tokens lie over the ranks; None if PyTorch has to."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    is_served = type(layer) is nn.Linear and layer.weight.dtype in PRODUCTS
    if not is_served or not getattr(style, "use_local_output", False):
        return None
    if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
        if is_gathered or _is_tokens(style.input_layouts[0]):
            return ColumnParallelLinear, True
        return (ColumnParallelLinear, False) if style.input_layouts == (Replicate(),) else None
    if isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
        if _is_tokens(style.output_layouts[0]):
            return RowParallelLinear, True
        return (RowParallelLinear, False) if style.output_layouts == (Replicate(),) else None
    return None


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
    """Whether all column-parallel layers of a block can gather by themselves."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    below = {name: style for name, style in styles.items() if _is_inside(name, block)}
    inside = [name for name, style in below.items() if isinstance(style, ColwiseParallel)]
    return bool(inside) and all(_kind(module.get_submodule(name), styles[name], is_gathered=True) for name in inside)


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.") if block else name != ""


def _without_gather(style: Any) -> Any:
    """The block's input says how it lies, and stays where it is."""
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
