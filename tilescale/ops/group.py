# SPDX-License-Identifier: MIT
"""Ranks of an operator: PyTorch's groups as teams of the job.

Operators of `torch.library` take no objects, so a group is passed by its name; the job's group is "".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch.compiler import is_compiling

from tilescale.comm import Team, World, current_world, init
from tilescale.comm.refusal import refuse
from tilescale.errors import ArgumentError, TileScaleError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | str | None


_otherwise = ContextVar("otherwise", default=False)

F = TypeVar("F", bound=Callable[..., Any])

_IN_GRAPHS = "@"
"""Separator between the name of a group and the ranks, in compiled graphs."""

NOT_A_MEMBER = -100
"""The group that torch.distributed.new_group returns on ranks that it does not name."""


def group_name(group: Group) -> str:
    """The name under which operators know a group. Raises ArgumentError: a mesh of several dimensions, or something
    else. `group`: a process group or its name, a DeviceMesh of one dimension (a slice, mesh["tp"]), or None for all
    ranks of the job."""
    if group is None or isinstance(group, str):
        return group or ""
    mesh: Any = group if is_mesh(group) else None
    if mesh is not None and mesh.ndim != 1:
        raise ArgumentError(
            f"group is a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}",
            hint='pass the slice that the operator spans, such as mesh["tp"]',
        )
    name = _name_of(group)
    if name is None:
        what = "one that this rank is not in" if group == NOT_A_MEMBER else type(group).__name__
        raise ArgumentError(f"group is {what}", hint="pass a process group, a slice of a DeviceMesh, or None for all")
    return name


def collective(function: F) -> F:
    """Make an operator notify the other ranks of its group when it fails on this one; they would wait for it."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_compiling():
            return function(*args, **options)
        try:
            return function(*args, **options)
        except (Exception, KeyboardInterrupt) as error:
            if not (isinstance(error, ArgumentError) and _otherwise.get()):
                refuse(_team_in(args, options), function.__name__, error)
            raise

    return call  # type: ignore[return-value]


@contextmanager
def otherwise() -> Iterator[None]:
    """Fall back for arguments that an operator refuses, on all ranks alike: no rank is notified of the error."""
    token = _otherwise.set(True)
    try:
        yield
    finally:
        _otherwise.reset(token)


def _team_in(args: Sequence[Any], options: dict[str, Any]) -> Team | None:
    """The ranks of an operator's call, by its group or by an argument that has one; None if they cannot be known."""
    group = options.get("group") or next((x.group for x in (*args, *options.values()) if hasattr(x, "group")), None)
    try:
        return None if current_world() is None else team_of(group_name(group))
    except TileScaleError:
        return None


def is_mesh(group: Any) -> bool:
    """Whether `group` is a DeviceMesh, without loading the module: a mesh implies that it is loaded."""
    loaded = sys.modules.get("torch.distributed.device_mesh")
    return loaded is not None and isinstance(group, loaded.DeviceMesh)


def team_of(name: str) -> Team:
    """The team of a group's ranks; joins the job if necessary."""
    return _team(init(), _ranks(name))


def team_of_two(name: str, peer: int) -> Team:
    """The team of this rank and another one of a group, in the order of the job's ranks."""
    return _team(init(), tuple(sorted((init().rank, _ranks(name)[peer]))))


def size_of(name: str) -> int:
    """Number of ranks of a group."""
    return len(_ranks(name))


def is_one_group(name: str, other: str) -> bool:
    """Whether two groups have the same ranks."""
    return name == other or _ranks(name) == _ranks(other)


def rank_of(name: str) -> int:
    """This rank's number in a group."""
    return _ranks(name).index(init().rank)


def name_in_graphs(name: str) -> str:
    """The name of a group with this rank and the number of ranks: shapes of results depend on both, and PyTorch's cache
    identifies a graph by its arguments."""
    return name if _IN_GRAPHS in name else f"{name}{_IN_GRAPHS}{rank_of(name)}/{size_of(name)}"


def _ranks(name: str) -> tuple[int, ...]:
    name = name.partition(_IN_GRAPHS)[0]
    if not name:
        return init().ranks
    from torch.distributed import distributed_c10d as c10d

    try:
        group: Any = c10d._resolve_process_group(name)  # type: ignore[arg-type] # a string by another name
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"group is {name!r}, the name of no process group here", hint="pass one that this rank is in"
        ) from error
    return tuple(c10d.get_process_group_ranks(group))


def _name_of(group: Any) -> str | None:
    if is_mesh(group):
        group = group.get_group()
    return str(group.group_name) if hasattr(group, "group_name") else None


# The mark of torch.compiler.assume_constant_result, without loading the compiler in each process: 1.4 s. PyTorch 2.11
# breaks graphs at each, newer ones trace them, down to the variables of the environment.
_ranks._dynamo_marked_constant = _name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
rank_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _team(world: World, ranks: tuple[int, ...]) -> Team:
    return world.team(ranks)
