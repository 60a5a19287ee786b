# SPDX-License-Identifier: MIT
"""DTensors in and out: operators work on shards, and a DTensor gives the placement of its shards over a mesh.

An operator takes DTensors with the placement of its shards, and returns one with the placement of its result. It moves
nothing to make them fit: placement is the user's decision, by `redistribute`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.group import group_name, is_one_group


def takes_dtensors(result: int | None, **inputs: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function of shards, with an argument `group`, take DTensors of one mesh of one dimension.

    Args:
        result: the dimension along which the result is split over the ranks; None: it is replicated, as is the second
            of two results.
        inputs: the same of the arguments that may be DTensors, or lists of them. Plain tensors among them are shards.

    The function raises ArgumentError for a DTensor with another placement, or on another mesh.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(map(_has_dtensor, (*args, *kwargs.values()))):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            mesh = _mesh(given, inputs)
            shards = {name: _shards(name, x, inputs.get(name)) for name, x in given.items()}
            made = function(**{**shards, "group": mesh})
            return _as_dtensor(made, mesh, result)

        return call

    return decorate


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor. The import takes seconds, and a DTensor implies that it has been done."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(x, loaded.DTensor)


@dataclass(frozen=True)
class DTensorPlacement:
    """Placement of a DTensor, by which a shard becomes another DTensor. `spec`: PyTorch's record of the other ones and
    the type, where a DTensor has it."""

    mesh: Any
    placements: Any
    shape: Any
    stride: Any
    spec: Any = None

    @classmethod
    def of(cls, x: Any) -> DTensorPlacement:
        return cls(x.device_mesh, x.placements, x.shape, x.stride(), x._spec)

    def made_of(self, shard: Any) -> Any:
        """The DTensor with this shard; None of None."""
        if shard is None:
            return None
        from torch.distributed.tensor import DTensor

        if self.spec is not None and self.spec.tensor_meta.dtype is shard.dtype and not torch.is_grad_enabled():
            return DTensor(shard, self.spec, requires_grad=False)  # `from_local` makes another spec, in Python
        how = {"run_check": False, "shape": self.shape, "stride": self.stride}
        return DTensor.from_local(shard, self.mesh, self.placements, **how)


def brought(name: str, x: Any, dim: int | None, group: str, *, uneven: bool = False) -> Any:
    """Input of a layer: this rank's part of a DTensor, along a dimension or whole (None); other values unchanged.

    For a replicated tensor each rank has a part of the gradient: PyTorch adds these up where they are needed, once for
    all layers. A tensor with another placement is redistributed, as by PyTorch's own parallel layers. Raises
    ArgumentError for one on ranks other than the group's, or that cannot be split evenly among them; if `uneven`, the
    last ranks have shorter parts, or none.
    """
    if not is_dtensor(x):
        return x
    mesh, dim = x.device_mesh, None if dim is None or not x.ndim else dim % x.ndim
    if mesh.ndim != 1 or not is_one_group(group_name(mesh), group):
        raise ArgumentError(f"{name} lies on {mesh}, the layer on another group", hint=f"pass {name}.to_local()")
    if dim is not None and not uneven:
        _check_even(name, x, dim)
    from torch.distributed.tensor import Partial

    wanted = (_placement(dim),)
    lying = x if tuple(x.placements) == wanted else x.redistribute(placements=wanted)
    return lying.to_local(grad_placements=[Partial()] if dim is None else None)


def local_tensor(x: Any) -> Any:
    """A tensor, or None, or this rank's shard if it is a DTensor."""
    return x.to_local() if is_dtensor(x) else x


def with_own_storage(x: Any) -> Any:
    """A shard as a storage by itself: PyTorch can neither copy nor save a DTensor whose shard begins inside of a
    storage. It is at the same place in memory, but a copy where it is to be differentiated again."""
    if x.__class__ is not torch.Tensor or x.is_meta or not x.storage_offset():
        return x
    return x.clone() if x.requires_grad else torch.from_dlpack(x)


def split_over(shard: Any, mesh: Any, dim: int, extent: int) -> Any:
    """The DTensor of a dimension's extent whose shard is this, its dimensions in the same order in memory; its parts
    need not be equal."""
    dim %= shard.ndim
    shape = (*shard.shape[:dim], extent, *shard.shape[dim + 1 :])
    inside = [[j for j in range(shard.ndim) if (shard.stride(j), i) < (shard.stride(i), j)] for i in range(shard.ndim)]
    strides = tuple([math.prod([shape[j] for j in each]) for each in inside])
    return DTensorPlacement(mesh, (_placement(dim),), shape, strides).made_of(shard)


def _has_dtensor(x: Any) -> bool:
    return any(map(is_dtensor, x)) if isinstance(x, list | tuple) else is_dtensor(x)


def _mesh(given: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mesh of all DTensors. Raises ArgumentError if there are several, or if it is not the group."""
    found: dict[str, Any] = {}
    for name, x in given.items():
        for i, one in enumerate(x if isinstance(x, Sequence) else [x]):
            if is_dtensor(one):
                label = f"{name}[{i}]" if isinstance(x, Sequence) else name
                if name not in inputs:
                    raise ArgumentError(f"{label} is a DTensor", hint=f"pass this rank's part: {label}.to_local()")
                found[label] = one.device_mesh
    (first, mesh), *others = found.items()
    if mesh.ndim != 1:
        raise ArgumentError(
            f"{first} lies on a mesh of {mesh.ndim} dimensions",
            hint="pass DTensors of the slice that the operator spans, or shards: to_local(), and group=",
        )
    for name, other in others:
        if other != mesh:
            raise ArgumentError(f"{name} lies on {other}, {first} on {mesh}", hint="distribute both over one mesh")
    if given.get("group") is not None and group_name(given["group"]) != group_name(mesh):
        raise ArgumentError(f"group is another one than the mesh of {first}", hint="leave group out")
    return mesh


def _shards(name: str, x: Any, dim: int | None) -> Any:
    """This rank's shard of an argument. Raises ArgumentError for a DTensor with another placement."""
    if isinstance(x, Sequence) and not isinstance(x, str):
        return [_shards(f"{name}[{i}]", one, dim) for i, one in enumerate(x)]
    if not is_dtensor(x):
        return x
    wanted = _placement(dim if dim is None else dim % x.ndim)
    if tuple(x.placements) != (wanted,):
        raise ArgumentError(
            f"{name} lies as {x.placements[0]}", hint=f"it is to lie as {wanted}: {name}.redistribute(placements=...)"
        )
    if dim is not None:
        _check_even(name, x, dim)
    return x.to_local()


def _check_even(name: str, x: Any, dim: int) -> None:
    size = x.device_mesh.size()
    if x.shape[dim] % size:
        raise ArgumentError(
            f"dimension {dim} of {name} is {x.shape[dim]}, its mesh has {size} ranks",
            hint=f"pad {name} to a multiple of {size}",
        )


def _as_dtensor(made: Any, mesh: Any, dim: int | None) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(made, tuple):
        return _as_dtensor(made[0], mesh, dim), _as_dtensor(made[1], mesh, None)
    if isinstance(made, list):
        return [_as_dtensor(one, mesh, dim) for one in made]
    return DTensor.from_local(made, mesh, [_placement(dim)], run_check=False)


def _placement(dim: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if dim is None else Shard(dim)
