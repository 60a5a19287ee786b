# SPDX-License-Identifier: MIT
"""Patterns of inductor's graphs that TileScale's operators replace, and their replacement.

    before                                                       after
    wait(all_gather_into_tensor(x)), mm by any number of weights     all_gather_matmul
    mm, wait(reduce_scatter_tensor(...))                             matmul_reduce_scatter
    mm, wait(all_reduce(...))                                        matmul_all_reduce
    wait(all_reduce(x)), add, RMSNorm                                all_reduce_rms_norm

Views that keep rows whole may be in between, and so may the splits and concatenations by which functional collectives
gather and scatter a dimension other than the first. A replacement is a function of the public operators, traced for the
tensors at hand. A pattern stays if they do not support its tensors, or if other nodes use its parts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    Ignored,
    KeywordArg,
    Match,
    PatternMatcherPass,
    fwd_only,
    register_graph_pattern,
)
from torch._inductor.virtualized import V
from torch.fx import Node
from torch.utils import _pytree as pytree

from tilescale.errors import ArgumentError
from tilescale.ops import strategy
from tilescale.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tilescale.ops.arguments import GEMM_TYPES
from tilescale.ops.gemm_ar import matmul_all_reduce
from tilescale.ops.group import otherwise, team_of
from tilescale.ops.symm_mem import gather_matmul, matmul_scatter

aten, c10d, prims = torch.ops.aten, torch.ops._c10d_functional, torch.ops.prims
WAIT, MM, ADDMM = c10d.wait_tensor.default, aten.mm.default, aten.addmm.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)

REPLACED = "tilescale_replaced"
"""Key in the meta of a collective's node that an operator replaced."""

patterns = PatternMatcherPass(pass_name="tilescale")

replaced: Counter[tuple[str, str]] = Counter()
"""Number of replacements of patterns since the pass was installed, by operator and the reason against it; "" if
replaced."""


def _awaited(collective: Any, *given: Any) -> CallFunction:
    """The result of a finished collective; the unfinished result may be an output, for the backward."""
    return CallFunction(WAIT, CallFunction(collective, *given, _users=MULTIPLE), _users=MULTIPLE)


GATHER = _awaited(c10d.all_gather_into_tensor.default, KeywordArg("shard"), Ignored(), KeywordArg("group"))
SCATTER = _awaited(
    c10d.reduce_scatter_tensor.default, KeywordArg("x"), KeywordArg("reduce_op"), Ignored(), KeywordArg("group")
)
SUM = _awaited(c10d.all_reduce.default, KeywordArg("x"), "sum", KeywordArg("group"))

_wide = CallFunction(prims.convert_element_type.default, KeywordArg("y"), torch.float32, _users=2)
_mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, _wide, 2), KeywordArg("dims"), True)
_scale = CallFunction(aten.rsqrt.default, CallFunction([aten.add.Tensor, aten.add.Scalar], _mean, KeywordArg("eps")))
_normed = CallFunction(aten.mul.Tensor, _wide, _scale)
_rounded = CallFunction(prims.convert_element_type.default, _normed, KeywordArg("dtype"))
NORMS = (  # of transformers, the weight on either side; of torch.nn.RMSNorm
    CallFunction(aten.mul.Tensor, KeywordArg("weight"), _rounded, _users=MULTIPLE),
    CallFunction(aten.mul.Tensor, _rounded, KeywordArg("weight"), _users=MULTIPLE),
    CallFunction(
        prims.convert_element_type.default,
        CallFunction(aten.mul.Tensor, _normed, KeywordArg("weight")),
        KeywordArg("dtype"),
        _users=MULTIPLE,
    ),
)


@register_graph_pattern(GATHER, pass_dict=patterns)
def _gather(match: Match, shard: Node, group: str) -> None:
    wait = match.output_node()
    whole, dim = _reassembled(wait)
    rows = list(_flattened(whole))
    gemms = [p for x in rows for p in x.users if _multiplies(p, x) and not _depends(p, wait, through=x)]
    if not gemms:
        return
    keeps = any(user not in gemms and user not in rows for x in rows for user in x.users)
    biases = [p.args[0] if p.target is ADDMM else None for p in gemms]

    def fused(shard: Any, weights: Any, biases: Any) -> list[Any]:
        kept, results = gather_matmul(shard, weights, dim, group, keeps, bias=biases)
        return [*(x.flatten(0, -2) for x in results), *([kept.contiguous()] if keeps and kept is not None else [])]

    old = [*gemms, *([whole] if keeps else [])]
    _replace("all_gather_matmul", wait, old, fused, shard, [p.args[-1] for p in gemms], biases)


@register_graph_pattern(SCATTER, pass_dict=patterns)
def _scatter(match: Match, x: Node, reduce_op: str, group: str) -> None:
    wait = match.output_node()
    whole, dim = _parts(x, 0) or (x, 0)
    gemm = _gemm(whole)
    if gemm is None:
        return

    def fused(a: Any, b: Any, shape: Any) -> list[Any]:
        given = a if shape is None else a.reshape(*shape[:-1], a.shape[-1])
        return [matmul_scatter(given, b, reduce_op, dim, group).contiguous()]

    _replace("matmul_reduce_scatter", wait, [wait], fused, *gemm.args, _shape(whole))


@register_graph_pattern(SUM, pass_dict=patterns)
def _sum(match: Match, x: Node, group: str) -> None:
    wait, gemm = match.output_node(), _gemm(x)
    if gemm is None:
        return

    def fused(a: Any, b: Any, shape: Any) -> list[Any]:
        result = matmul_all_reduce(a, b, group=group)
        return [result if shape is None else result.reshape(shape)]

    _replace("matmul_all_reduce", wait, [wait], fused, *gemm.args, _shape(x))


def _norm(match: Match, y: Node, weight: Node, dims: list[int], eps: float, dtype: torch.dtype) -> None:
    """Replaced where the GEMM in front of the sum is better not overlapped with it."""
    found = _residual_sum(y)
    if found is None or dims not in ([-1], [y.meta["val"].ndim - 1]) or dtype != y.meta["val"].dtype:
        return
    (wait, residual), offset = found, 0.0
    if weight.target is aten.add.Tensor and isinstance(_argument(weight, 1), (int, float)):  # Gemma's, 1 + weight
        weight, offset = _argument(weight), _argument(weight, 1)
    if _is_cast(weight):
        weight = _argument(weight)
    x, _, group = _argument(wait).args
    if _overlaps(x, group):
        return

    def fused(x: Any, weight: Any, residual: Any) -> list[Any]:
        a = x if residual is None else x.reshape(residual.shape)
        return list(all_reduce_rms_norm(a, weight, residual, eps=eps, weight_offset=offset, group=group))

    _replace("all_reduce_rms_norm", wait, [match.output_node(), y], fused, x, weight, residual, before=y)


for _pattern in NORMS:
    register_graph_pattern(_pattern, pass_dict=patterns)(_norm)


def _replace(
    name: str, wait: Node, old: list[Node], fused: Callable[..., list[Any]], *args: Any, before: Node | None = None
) -> None:
    """Replace nodes by the traced function of the arguments' values, unless an operator refuses them."""
    flat, structure = pytree.tree_flatten(args)
    nodes = [x for x in flat if isinstance(x, Node)]

    def call(*values: Any) -> list[Any]:
        given = iter(values)
        return fused(*pytree.tree_unflatten([next(given) if isinstance(x, Node) else x for x in flat], structure))

    try:
        with V.fake_mode, otherwise():
            traced = fwd_only(call, [x.meta["val"] for x in nodes], run_functional_passes=False).graph
    except ArgumentError as error:
        replaced[name, error.message] += 1
        return
    graph, inputs = wait.graph, dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
    with graph.inserting_before(before or wait):
        new: Any = graph.graph_copy(traced, inputs)
    for one, other in zip(old, new, strict=True):
        one.replace_all_uses_with(other)
    if old == [wait]:  # the backward may have saved the unfinished result
        _argument(wait).replace_all_uses_with(new[0], lambda user: user is not wait)
    wait.meta[REPLACED] = _argument(wait).meta[REPLACED] = True
    replaced[name, ""] += 1


def is_impure(node: Node) -> bool:
    """Whether a node has to stay without users; a collective whose result an operator gives is not awaited."""
    return node.is_impure() and REPLACED not in node.meta


def _argument(node: Node, position: int = 0) -> Any:
    """An argument of a node: another one, or several, as patterns have it."""
    return node.args[position]


def _multiplies(node: Node, x: Node) -> bool:
    """Whether a node is x @ b, or x @ b + bias for a bias of each column, of types whose GEMMs overlap."""
    if node.target is ADDMM:
        is_linear = _argument(node, 1) is x and not node.kwargs and _argument(node).meta["val"].ndim == 1
    else:
        is_linear = node.target is MM and node.args[0] is x
    return is_linear and node.meta["val"].dtype in GEMM_TYPES


def _gemm(node: Node) -> Node | None:
    """The GEMM that a node is a view of, if it has no other use."""
    while _keeps_rows(node) and len(node.users) == 1:
        node = _argument(node)
    is_gemm = node.target is MM and _multiplies(node, _argument(node))
    return node if is_gemm and len(node.users) == 1 else None


def _keeps_rows(node: Node) -> bool:
    """Whether a node is a view that keeps the columns, and so the rows, in order."""
    return node.target in VIEWS and bool(node.meta["val"].shape[-1] == _argument(node).meta["val"].shape[-1])


def _flattened(whole: Node) -> Iterator[Node]:
    """A node and its views that keep rows."""
    yield whole
    for user in whole.users:
        if _keeps_rows(user):
            yield from _flattened(user)


def _shape(node: Node) -> Any:
    """The extents of a view, as the graph has them; None if the node is not a view."""
    return node.args[1] if node.target in VIEWS else None


def _reassembled(wait: Node) -> tuple[Node, int]:
    """The gathered tensor and the dimension: gathers of a dimension other than the first are split and joined."""
    split = next(iter(wait.users), None)
    if split is None or split.target not in SPLITS or len(wait.users) > 1:
        return wait, 0
    joined = next((user for piece in split.users for user in piece.users), None)
    if joined is None or joined.target is not aten.cat.default or _parts(joined) != (wait, 0):
        return wait, 0
    return joined, _dim(joined)


def _parts(joined: Node, along: int | None = None) -> tuple[Node, int] | None:
    """The tensor that was split and joined again, all parts in order and nothing else, and the split dimension.

    Args:
        joined: a concatenation, or something else, of which there is none.
        along: the dimension along which it is joined, if not any.
    """
    if joined.target is not aten.cat.default or along not in (None, _dim(joined)):
        return None
    pieces = _argument(joined)
    split = _argument(pieces[0]) if pieces[0].target is operator.getitem else None
    if split is None or split.target not in SPLITS or any(piece.target is not operator.getitem for piece in pieces):
        return None
    in_order = [piece.args for piece in pieces] == [(split, i) for i in range(len(split.meta["val"]))]
    is_alone = all(len(piece.users) == 1 for piece in pieces)
    return (_argument(split), _dim(split)) if in_order and is_alone else None


def _dim(node: Node) -> int:
    """The dimension of a split or a concatenation, counted from 0."""
    position, x = (1, _argument(node)[0]) if node.target is aten.cat.default else (2, _argument(node))
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return dim % x.meta["val"].ndim


def _residual_sum(y: Node) -> tuple[Node, Node | None] | None:
    """The all-reduce whose sum y is, with the residual added to it, if it has no other use."""
    if wait := _summed(y):
        return wait, None
    if y.target is not aten.add.Tensor or y.kwargs:
        return None
    for x, residual in (y.args, y.args[::-1]):
        wait = _summed(x) if isinstance(x, Node) and len(x.users) == 1 else None
        if wait and isinstance(residual, Node) and residual.meta["val"].shape == y.meta["val"].shape:
            return wait, residual
    return None


def _summed(node: Node) -> Node | None:
    """The finished all-reduce that a node is a view of."""
    while _keeps_rows(node) and len(_argument(node).users) == 1:
        node = _argument(node)
    return node if SUM.match(node) and len(_argument(node).users) == 1 else None


def _is_cast(node: Node) -> bool:
    return node.target is prims.convert_element_type.default and node.args[1] == torch.float32


def _overlaps(x: Node, group: str) -> bool:
    """Whether the input of an all-reduce is a GEMM that is better overlapped with it."""
    gemm = _gemm(x)
    if gemm is None:
        return False
    a, b = (_argument(gemm, i).meta["val"] for i in range(2))
    rows, team = a.shape[0], team_of(group)
    expected = rows.node.hint if isinstance(rows, torch.SymInt) else rows
    job = strategy.CollectiveGemm("allreduce", -(-expected // team.size), (b.shape[1],), a.shape[1], a.dtype)
    return strategy.overlaps(job, team)


def _depends(node: Node, on: Node, through: Node) -> bool:
    """Whether an operand of a GEMM, other than `through`, is made of a node."""
    waiting, seen = [x for x in node.all_input_nodes if x is not through], set[Node]()
    while waiting:
        one = waiting.pop()
        if one is on:
            return True
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False
