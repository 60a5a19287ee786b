# SPDX-License-Identifier: MIT
"""Inputs that operators reject, by the name of the argument; and edges of the supported ones, in a job of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import GroupMember

from tilescale import ops
from tilescale.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("emulated")


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def brain(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def eighth(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x], layout=torch.jagged)


def column(x: torch.Tensor) -> torch.Tensor:
    return ops.ColumnParallelLinear.shard(torch.nn.Linear(16, 16).half())(x)


ONES = torch.ones(3), torch.ones(1)


def lengths(batch: int) -> torch.Tensor:
    return torch.zeros(batch, dtype=torch.int32)


def decode(page: int = 16, **given: object) -> torch.Tensor:
    """Of two sequences in three pages, with some arguments in place of the right ones."""
    k = given.pop("k", half(3, page, 2, 64))
    given = {"block_table": torch.zeros(2, 2, dtype=torch.int32), **given}
    return ops.flash_decode(half(2, 4, 64), k, given.pop("v", k), lengths(2), **given)


def backward(**given: object) -> object:
    """Of four queries and keys, with some arguments in place of the right ones."""
    tensors = {name: half(1, 4, 2, 64) for name in ("grad", "q", "k", "v", "out")}
    return ops.sequence_attention_backward(**{**tensors, "lse": torch.zeros(1, 2, 4), **given})


def experts(**given: object) -> torch.Tensor:
    """Four tokens and two experts, with some arguments in place of the right ones."""
    choice = given.pop("choice", (torch.zeros(4, 2).int(), torch.ones(4, 2)))
    return ops.moe_layer(brain(4, 16), choice, brain(2, 32, 16), brain(2, 16, 16), **given)


def logits(n: int) -> dict[str, object]:
    return {"choice": torch.zeros(4, n), "router": ops.Router(2)}


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


def routing() -> ops.Routing:
    return ops.moe_route(torch.tensor([[0], [1], [1], [-1]]), 2, room=256)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ops.all_gather_matmul(torch.randn(4, 8), half(8, 8)), "a is torch.float32"),
        (lambda: ops.all_gather_matmul(half(4), half(8, 8)), r"a has shape \(4,\)"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(16, 8)), "a has 8 columns, b has 16 rows"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(8, 8).bfloat16()), "b is torch.bfloat16, a is torch.float16"),
        (lambda: ops.all_gather_matmul(half(4, 8), [half(8, 8), half(8, 0)]), r"b\[1\] has no columns"),
        (lambda: ops.all_gather_matmul(half(4, 8), [half(8, 8)], bias=[None, None]), "b is 1 matrices, bias 2"),
        (lambda: ops.all_gather_matmul(half(4, 8), []), "b is an empty list"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(8, 8), activation="tanh"), "activation is 'tanh'"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(8, 8), activation=["relu"]), r"activation is \['relu'\]"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(8, 8), gated=True), r"gated is set, b has \[8\] columns"),
        (lambda: ops.all_gather_matmul(half(4, 8), [half(8, 8), half(8, 16)], gated=True), r"b has \[8, 16\] columns"),
        (lambda: ops.all_gather_matmul(half(4, 8), half(8, 8), scales=ONES), "a is torch.float16"),
        (lambda: ops.all_gather_matmul(half(4, 16), half(16, 16), float8=ops.Float8()), "a is torch.float16"),
        (lambda: ops.matmul_all_reduce(eighth(4, 16), eighth(16, 16), scales=ONES, float8=ops.Float8()), "scales and"),
        (lambda: ops.matmul_reduce_scatter(brain(4, 16), brain(16, 16), float8="rowwise"), "float8 is 'rowwise'"),
        (lambda: ops.matmul_all_reduce(eighth(4, 16), eighth(16, 16).t()), "a is torch.float8_e4m3fn"),
        (lambda: ops.matmul_all_reduce(eighth(4, 16), eighth(16, 16).t(), scales=torch.ones(2)), "scales is Tensor"),
        (lambda: ops.matmul_reduce_scatter(eighth(4, 16), eighth(16, 16).t(), scales=3 * (ONES[1],)), "is 3 things"),
        (lambda: ops.matmul_reduce_scatter(half(4, 8), half(8, 8), bias=half(8).to("meta")), "bias is meta, a is cpu"),
        (lambda: ops.all_gather_matmul(half(4, 8), [half(8, 8), half(8, 8)], bias=half(8)), "b is 2 matrices, bias 1"),
        (lambda: column(half(2, 4, 8)), r"x has shape \(2, 4, 8\)"),
        (lambda: column(half(16)), r"x has shape \(16,\)"),
        (lambda: ops.parallelize_module(torch.nn.Linear(8, 8), None, {}), "device_mesh is None"),
        (lambda: ops.Float8("groupwise"), "scaling is 'groupwise'"),
        (lambda: ops.Float8(gradients=torch.float16), "gradients is torch.float16"),
        (lambda: ops.all_gather_matmul(eighth(4, 16), eighth(16, 16), scales=ONES), r"b has strides \(16, 1\)"),
        (lambda: ops.all_gather_matmul(eighth(4, 16), eighth(16, 16).t()), "a is torch.float8_e4m3fn"),
        (lambda: ops.matmul_reduce_scatter(eighth(4, 16), eighth(16, 16).t(), scales=ONES), "has 3 numbers"),
        (lambda: ops.matmul_reduce_scatter(half(4, 8), half(8, 8), bias=half(16)), "bias has 16 elements"),
        (lambda: ops.matmul_reduce_scatter(half(4, 8), half(8, 8), bias=half(8, 1)), r"bias has shape \(8, 1\)"),
        (lambda: ops.matmul_all_reduce(half(4, 0), half(0, 8)), "b has no rows"),
        (lambda: ops.matmul_all_reduce(half(4, 8), None), "b is NoneType"),
        (lambda: ops.matmul_all_reduce(nested(half(2, 8)), half(8, 8)), "a is a nested tensor"),
        (
            lambda: ops.matmul_all_reduce(eighth(4, 16).requires_grad_(), eighth(16, 16).t(), scales=ONES),
            "a is float8 and requires a gradient",
        ),
        (lambda: ops.all_gather_columns_matmul(half(4, 8), half(12, 8)), "a has 8 columns, b has 12 rows"),
        (lambda: ops.all_gather_columns_matmul(half(4, 8), brain(8, 8)), "b is torch.bfloat16"),
        (lambda: ops.all_gather_columns_matmul(half(1 << 17, 8), half(8, 8)), "a has 131072 rows"),
        (lambda: ops.matmul_all_gather(half(4, 8), half(8, 8), bias=half(9)), "bias has 9 elements, b has 8 columns"),
        (lambda: ops.matmul_all_gather(eighth(4, 8), eighth(8, 8)), "a is torch.float8_e4m3fn"),
        (lambda: ops.matmul_all_gather(half(1 << 17, 8), half(8, 8)), "a has 131072 rows"),
        (lambda: ops.all_reduce(torch.ones(3, dtype=torch.bool)), "a is torch.bool"),
        (lambda: ops.all_reduce(half(3), op="mean"), "op is 'mean'"),
        (lambda: ops.all_reduce(half(3).requires_grad_(), op="max"), "a requires a gradient, op is 'max'"),
        (lambda: ops.all_gather(half(2), dim=1), "dim is 1, the tensor has 1 dimensions"),
        (lambda: ops.all_gather(half(2), dim="rows"), "dim is 'rows'"),
        (lambda: ops.all_reduce(half(2, 2).to_sparse()), "a is of layout torch.sparse_coo"),
        (lambda: ops.all_reduce(nested(half(2))), "a nested tensor"),
        (lambda: ops.all_to_all(half(2, 2), cut=2), "cut is 2"),
        (lambda: ops.all_gather(half(2), group=3), "group is int"),
        (lambda: ops.all_gather(half(2), group="tp"), "group is 'tp', the name of no process group here"),
        (lambda: ops.all_gather(half(2), group=GroupMember.NON_GROUP_MEMBER), "group is one that this rank is not in"),
        (lambda: ops.all_to_all_v(half(3, 8), [2], [2]), "a has 3 rows, sent names 2"),
        (lambda: ops.all_to_all_v(half(3, 8), [3], [4], most=3), "received has 4, most is 3"),
        (lambda: ops.all_to_all_v(half(3, 8), [3], [2]), "sent has 3 for rank 0 itself, received 2"),
        (lambda: ops.all_to_all_v(half(3, 8), torch.tensor([2])), "a has 3 rows, sent names 2"),
        (lambda: ops.all_to_all_v(half(3, 8), torch.tensor([-3])), r"sent\[0\] is -3"),
        (lambda: ops.broadcast(half(3), 1), "root is 1, the group has 1 ranks"),
        (lambda: ops.broadcast(half(3), -1), "root is -1"),
        (lambda: ops.all_gather(half(3), wire="float8"), "wire is 'float8'"),
        (lambda: ops.all_reduce(torch.ones(3).double(), wire="float8_e4m3fn"), "a is torch.float64"),
        (lambda: ops.all_reduce(half(3), op="max", wire="float8_e4m3fn"), "wire is 'float8_e4m3fn', op is 'max'"),
        (lambda: ops.reduce_scatter(half(3), wire=1), "wire is 1"),
        (lambda: ops.reduce_scatter(half(3), op="avg"), "op is 'avg'"),
        (lambda: ops.reduce_scatter(half(3), op="min", wire="float8_e4m3fn"), "wire is 'float8_e4m3fn', op is 'min'"),
        (lambda: ops.reduce_scatter(half(3).requires_grad_(), op="max"), "a requires a gradient, op is 'max'"),
        (lambda: ops.all_gather_v(half(3), most=2), "a has 3 rows, most is 2"),
        (lambda: ops.all_gather_v(half(3), most=0), "most is 0"),
        (lambda: ops.all_gather_v(half(3), torch.ones(2).int()), "rows has 2 numbers"),
        (lambda: ops.all_gather_v(half(3), 2), "rows is int"),
        (lambda: ops.batch_send_recv(ops.Send), "messages is type"),
        (lambda: ops.batch_send_recv([(half(3), 0)]), r"messages\[0\] is tuple"),
        (lambda: ops.batch_send_recv([ops.Send(half(3), 0), ops.Recv(half(3), 1)]), r"\[1\].source is 1"),
        (lambda: ops.batch_send_recv([ops.Send(3, 0)]), r"messages\[0\].tensor is int"),
        (lambda: ops.send(half(3), 0), "to is 0, this rank"),
        (lambda: ops.send(half(3).requires_grad_(), 0), "a requires a gradient"),
        (lambda: ops.recv(half(3), 2), "source is 2, the group has 1 ranks"),
        (lambda: ops.recv(None, 0), "like is NoneType"),
        (lambda: ops.halo_exchange(half(3), 0), "width is 0"),
        (lambda: ops.halo_exchange(half(3), 4), "dimension 0 of a is 3, width is 4"),
        (lambda: ops.halo_exchange(half(5), 2, in_place=True), "dimension 0 of a is 5, width is 2"),
        (lambda: ops.halo_exchange(half(3, 3), 1, (0, 1)), "dim names 2 dimensions, group is NoneType"),
        (lambda: ops.halo_exchange(half(3, 3), 1, (0, 0)), r"dim is \(0, 0\)"),
        (lambda: ops.halo_exchange(half(3, 3), (1, 2), 0), "width has 2 elements, dim has 1"),
        (lambda: ops.halo_exchange(half(3), periodic=1), "periodic is 1"),
        (lambda: ops.halo_exchange(half(3).requires_grad_(), in_place=True), "in_place is given where gradients"),
        (lambda: ops.scatter(half(3), 1), "root is 1, the group has 1 ranks"),
        (lambda: ops.scatter(half(3), 0, 1), "dim is 1, the tensor has 1 dimensions"),
        (lambda: ops.scatter([half(3)]), "a is list"),
        (lambda: ops.gather(half(3), 1.0), "root is 1.0"),
        (lambda: ops.gather(torch.ones(()), 0), "dim is 0, the tensor has 0 dimensions"),
        (lambda: ops.all_gather_v(half(1, 1)[0, 0]), r"a has shape \(\)"),
        (lambda: ops.moe_route(torch.ones(4, 2), 2), "chosen is torch.float32"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 0), "experts is 0"),
        (lambda: ops.moe_dispatch(half(3, 8), routing()), "x has 3 rows, routing says 4"),
        (lambda: ops.moe_dispatch(half(4, 4), routing()), "a row of x has 8 bytes"),
        (lambda: ops.moe_combine(half(4, 8), routing()), "y has 4 rows, routing says 256"),
        (lambda: ops.grouped_matmul(half(256, 8), half(3, 8, 8), routing()), "here are 2 experts"),
        (lambda: ops.grouped_matmul(half(256, 12), half(2, 12, 8), routing()), "multiples of 8"),
        (lambda: ops.grouped_matmul(half(256, 8), half(2, 8, 0), routing()), r"b has shape \(2, 8, 0\)"),
        (lambda: ops.grouped_matmul(half(256, 0), half(2, 0, 8), routing()), r"b has shape \(2, 0, 8\)"),
        (lambda: ops.grouped_matmul(half(256, 8), half(2, 8, 8).to("meta"), routing()), "b is meta, x is cpu"),
        (lambda: ops.moe_dispatch(half(4, 8).to("meta"), routing()), "x is meta, routing is cpu"),
        (lambda: ops.moe_combine(half(256, 8), routing(), meta(256)), "weights is meta, routing is cpu"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 2, meta(4, 2)), "weights is meta, chosen is cpu"),
        (lambda: experts(choice=(meta(4, 2).int(), meta(4, 2))), "choice is meta, x is cpu"),
        (lambda: experts(choice=(meta(4, 0).int(), meta(4, 0))), "choice is meta, x is cpu"),
        (lambda: experts(choice=(torch.ones(4, 0).int(), torch.ones(4, 0))), "choice has no choices"),
        (lambda: experts(bias=torch.zeros(2)), "bias is given without logits"),
        (lambda: experts(**logits(3)), "logits of 3 experts, the ranks have 2"),
        (lambda: experts(**logits(3), replicas=torch.ones(2, 1).int()), "of 3 experts, replicas has 2"),
        (lambda: experts(replicas=torch.ones(2, 0).int()), r"replicas has shape \(2, 0\)"),
        (lambda: experts(replicas=meta(2, 1).int()), "replicas is meta"),
        (lambda: experts(shared=brain(32, 16)), "shared is Tensor"),
        (lambda: experts(shared=(half(32, 16), half(16, 16))), r"shared\[0\] is torch.float16"),
        (lambda: experts(shared=(brain(32, 16), brain(16, 8))), r"shared has shapes \(32, 16\) and \(16, 8\)"),
        (lambda: ops.all_reduce_rms_norm(half(4, 12), half(12)), "a has 12 features"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(16)), r"weight has shape \(16,\)"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), half(3, 8)), r"residual has shape \(3, 8\)"),
        (lambda: ops.flash_decode(half(2, 4, 64), half(2, 9, 3, 64), half(2, 9, 3, 64), lengths(2)), "q has 4 heads"),
        (
            lambda: ops.flash_decode(half(2, 4, 64), *2 * [half(2, 9, 4, 64)], lengths(2).to("meta")),
            "lengths is meta, q is cpu",
        ),
        (lambda: ops.flash_decode(half(2, 4, 32), half(2, 9, 4, 32), half(2, 9, 4, 64), lengths(2)), "D is 32"),
        (lambda: ops.mla_decode(half(2, 4, 128), half(2, 9, 128), lengths(3), value_dim=64), "lengths has 3 numbers"),
        (lambda: ops.mla_decode(half(2, 4, 128), half(2, 9, 128), lengths(2)), "value_dim 512"),
        (lambda: ops.sequence_attention(*[half(1, 5, 2, 64)] * 3), "q has 5 tokens"),
        (lambda: ops.sequence_attention(*[half(1, 4, 2, 80)] * 3), "D is 80"),
        (lambda: ops.sequence_attention(half(1, 4, 2, 64), half(1, 4, 2, 64), half(1, 6, 2, 64)), "v is"),
        (lambda: backward(grad=half(1, 6, 2, 64)), r"grad is \(1, 6, 2, 64\), q \(1, 4, 2, 64\)"),
        (lambda: backward(out=brain(1, 4, 2, 64)), "out is torch.bfloat16, q is torch.float16"),
        (lambda: backward(lse=torch.zeros(1, 4, 2)), r"lse is \(1, 4, 2\)"),
        (lambda: backward(lse=half(1, 2, 4)), "lse is torch.float16"),
        (lambda: backward(q=half(1, 4, 2, 80)), "k is"),
        (lambda: backward(ring=1), "ring is 1"),
        (lambda: ops.workspace(0, 8), "rows is 0"),
        (lambda: ops.RowParallelLinear.shard(nn.ReLU()), "linear is ReLU"),
        (lambda: ops.RowParallelLinear.shard(ops.RowParallelLinear.shard(nn.Linear(8, 8))), "is RowParallelLinear"),
        (lambda: ops.ColumnParallelLinear(16, 16), "not made from sizes"),
        (lambda: ops.all_gather_matmul(half(1 << 17, 8), half(8, 8)), "a has 131072 rows on each rank"),
        (lambda: ops.all_gather_matmul(half(4, 8), [half(8, 8), half(8, 8)], gated="silu"), "gated is 'silu'"),
        (lambda: ops.all_to_all_v(half(1, 8), 1, [1]), "sent is int"),
        (lambda: ops.all_to_all_v(half(1, 8), None), "sent is NoneType"),
        (lambda: ops.all_to_all_v(half(1, 8), [1], 1), "received is int"),
        (lambda: ops.all_to_all_v(half(1, 8), [1], torch.tensor([1])), "received is Tensor"),
        (lambda: ops.all_to_all_v(half(1, 8), [1.0], [1.0]), r"sent\[0\] is 1.0"),
        (lambda: ops.all_to_all_v(half(1, 8), "1", [1]), "sent is str"),
        (lambda: ops.all_to_all_v(half(1, 8), ["1"], [1]), r"sent\[0\] is '1'"),
        (lambda: ops.all_to_all_v(half(1, 8), [1], [-1]), r"received\[0\] is -1"),
        (lambda: ops.all_to_all_v(half(1, 8), [1], [1], most="x"), "most is 'x'"),
        (lambda: ops.all_to_all_v(half(1, 8), [1], [1], most=1.5), "most is 1.5"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), eps="x"), "eps is 'x'"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), 1.0), "residual is float"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), weight_offset="x"), "weight_offset is 'x'"),
        (lambda: ops.all_reduce_layer_norm(half(4, 8), half(8), half(4)), r"bias has shape \(4,\)"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), out=half(4, 8)), "out is Tensor"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), out=(None, half(4, 4))), r"out\[1\] has shape"),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8).float(), half(8)), "a is torch.float32"),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), group_size=64), "group_size is 64"),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), scale=half(1)), "scale is torch.float16"),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), scale=0.5), "scale is float"),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), scale=ONES[0]), r"scale has shape \(3,\)"),
        (lambda: ops.all_reduce_rms_norm(half(4, 8), half(8), out=2 * (half(4, 8),)), r"out\[1\] is the memory of"),
        (
            lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), scale=torch.ones(1), group_size=128),
            "scale is given with group_size",
        ),
        (lambda: ops.all_reduce_rms_norm_float8(half(4, 8), half(8), packed=True), "packed is given without"),
        (lambda: ops.sequence_attention(*[half(1, 4, 2, 64)] * 3, scale="x"), "scale is 'x'"),
        (lambda: ops.sequence_attention(*[half(1, 4, 2, 64)] * 3, scale=-0.5), "scale is -0.5"),
        (lambda: ops.sequence_attention(*[half(1, 4, 2, 64)] * 3, scale=float("nan")), "scale is nan"),
        (lambda: ops.flash_decode(half(2, 4, 64), *2 * [half(2, 9, 4, 64)], lengths(2), scale=0), "scale is 0"),
        (lambda: ops.sequence_attention(*[half(1, 4, 2, 64)] * 3, causal="x"), "causal is 'x'"),
        (lambda: ops.flash_decode(half(2, 4, 64), *2 * [half(2, 9, 4, 64)], lengths(2), scale="x"), "scale is 'x'"),
        (lambda: ops.flash_decode(half(2, 4, 64), *2 * [half(2, 9, 0, 64)], lengths(2)), "q has 4 heads, k 0"),
        (lambda: ops.flash_decode(half(2, 4, 64), *2 * [half(2, 9, 4, 64)], lengths(2), own_heads=1), "own_heads is 1"),
        (lambda: ops.mla_decode(half(2, 4, 128), half(2, 9, 128), lengths(2), value_dim="x"), "value_dim is 'x'"),
        (lambda: decode(page=24), "pages of k have 24 keys"),
        (lambda: decode(page=512), "pages of k have 512 keys"),
        (lambda: decode(k=half(0, 16, 2, 64)), "k has no pages"),
        (lambda: decode(k=half(3, 2, 16, 64).transpose(1, 2)), "k has strides"),
        (lambda: decode(block_table=None), "k has 3 sequences, q 2"),
        (lambda: decode(block_table=torch.zeros(2, 2).long()), "block_table is torch.int64"),
        (lambda: decode(block_table=torch.zeros(3, 2).int()), r"block_table has shape \(3, 2\), q 2 sequences"),
        (lambda: decode(block_table=torch.zeros(2, 0).int()), r"block_table has shape \(2, 0\)"),
        (lambda: decode(k_scale=torch.ones(1)), "k_scale is given, k is torch.float16"),
        (lambda: decode(k=eighth(3, 16, 2, 64), v_scale=torch.ones(3)), "v_scale has 3 numbers"),
        (lambda: decode(k=eighth(3, 16, 2, 64), k_scale=2.0), "k_scale is float"),
        (lambda: decode(v=eighth(3, 16, 2, 64)), "v is torch.float8_e4m3fn, k is torch.float16"),
        (lambda: decode(k=brain(3, 16, 2, 64)), "k is torch.bfloat16"),
        (
            lambda: ops.mla_decode(half(2, 4, 128), eighth(2, 9, 128), lengths(2), value_dim=64, cache_scale=ONES[0]),
            "cache_scale has 3 numbers",
        ),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 2.0), "experts is 2.0"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), "x"), "experts is 'x'"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 2, room=0), "room is 0"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 2, room="x"), "room is 'x'"),
        (lambda: ops.moe_route(torch.ones(4, 2).int(), 2, most=4.5), "most is 4.5"),
        (lambda: ops.moe_dispatch(half(4, 8), None), "routing is NoneType"),
        (lambda: ops.moe_combine(half(256, 8), None), "routing is NoneType"),
        (lambda: ops.grouped_matmul(half(256, 8), half(2, 8, 8), None), "routing is NoneType"),
        (lambda: ops.grouped_matmul(eighth(256, 8), eighth(2, 8, 8), routing(), torch.ones(3)), "scales is Tensor"),
        (lambda: ops.sequence_positions(5), "tokens is 5"),
        (lambda: ops.sequence_positions(-2), "tokens is -2"),
        (lambda: ops.sequence_positions("x"), "tokens is 'x'"),
        (lambda: ops.workspace(None, 8), "rows is None"),
        (lambda: ops.workspace(4, 2.5), "features is 2.5"),
        (lambda: ops.workspace(4, 8, "half"), "dtype is 'half'"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], said: str):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_an_output_is_of_the_shape_of_the_result_and_of_no_gradient():
    a, b, out = half(4, 8), half(8, 16), half(4, 16)
    assert ops.matmul_all_reduce(a, b, out=out) is out, "gradients are recorded, but none is required"
    with pytest.raises(ArgumentError, match=r"out has shape \(4, 8\)"):
        ops.matmul_all_reduce(a, b, out=half(4, 8))
    b.requires_grad_()
    with pytest.raises(ArgumentError, match="out is given where gradients are recorded"):
        ops.matmul_all_reduce(a, b, out=out)
    with torch.no_grad():
        assert ops.matmul_all_reduce(a, b, out=out) is out


def test_the_hint_says_which_matrices_fit():
    with pytest.raises(ArgumentError) as caught:
        ops.all_gather_matmul(half(4, 8), half(16, 8))
    assert caught.value.hint is not None and caught.value.hint.startswith("a is (M, K), b is (K, N)")


def test_nothing_to_do():
    assert ops.all_gather_matmul(half(0, 8), half(8, 16)).shape == (0, 16)
    assert ops.matmul_reduce_scatter(half(0, 8), half(8, 16)).shape == (0, 16)
    assert ops.matmul_all_reduce(half(0, 8), half(8, 16)).shape == (0, 16)
    assert ops.matmul_all_gather(half(0, 8), half(8, 16)).shape == (0, 16)
    assert ops.all_gather_columns_matmul(half(0, 8), half(8, 16)).shape == (0, 16)
    assert ops.all_reduce(half(0)).shape == ops.all_gather(half(0)).shape == (0,)


@pytest.mark.parametrize(
    "call",
    [
        ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce, ops.matmul_all_gather,
        ops.all_gather_columns_matmul,
    ],
)  # fmt: skip
def test_gradients_of_nothing(call: Callable[..., torch.Tensor]):
    a, b = half(0, 8).requires_grad_(), half(8, 16).requires_grad_()
    call(a, b).sum().backward()
    assert a.grad.shape == (0, 8) and not b.grad.any()


def test_gradients_of_experts_without_a_token():
    """Experts have them where only they learn, too."""
    x, gate_up, down = brain(0, 16), *(w.requires_grad_() for w in (brain(2, 32, 16), brain(2, 16, 16)))
    weights = torch.ones(0, 2, requires_grad=True)
    ops.moe_layer(x, (torch.zeros(0, 2).int(), weights), gate_up, down).sum().backward()
    assert weights.grad.shape == (0, 2) and not gate_up.grad.any() and not down.grad.any()


def test_tensors_that_lie_anyhow():
    a, b = half(6, 48)[:, 8:24], half(40, 40)[:16, 3:27]  # rows apart, and begun where no bulk copy may
    want = a.float() @ b.float()
    for call in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        torch.testing.assert_close(call(a, b).float(), want, rtol=1e-2, atol=2e-2)


def test_autocast_says_the_type():
    x, layer = torch.randn(4, 16, requires_grad=True), nn.Linear(16, 24)
    for kind in (ops.ColumnParallelLinear, ops.RowParallelLinear):
        with torch.autocast("cpu", torch.bfloat16):
            want, got = layer(x), kind.shard(copy.deepcopy(layer))(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        (grad,) = torch.autograd.grad(got.float().sum(), x)
        assert grad.dtype == torch.float32
    q = torch.randn(1, 4, 2, 64)
    with torch.autocast("cpu", torch.float16):
        assert ops.sequence_attention(q, q, q).dtype == torch.float16
        assert ops.flash_decode(q[:, 0], q, q, lengths(1)).dtype == torch.float16
        assert ops.mla_decode(*2 * [torch.randn(1, 2, 128)], lengths(1), value_dim=64).dtype == torch.float16
        grouped = ops.grouped_matmul(torch.randn(256, 16), torch.randn(2, 16, 8), routing())
        assert grouped.dtype == torch.float16
    with pytest.raises(ArgumentError, match=r"a is torch.float64"), torch.autocast("cpu", torch.bfloat16):
        ops.matmul_all_reduce(x.detach().double(), x.detach().double().t())


def test_tensors_without_memory_have_shapes():
    """Tensors on the device "meta", as models are made and tried before they are loaded."""
    x, w = (half(n, 16).to("meta") for n in (4, 24))
    assert ops.all_gather_matmul(x, [w.t()], activation="silu")[0].is_meta
    assert ops.matmul_reduce_scatter(ops.all_gather_matmul(x, w.t()), w).shape == (4, 16)
    with pytest.raises(ArgumentError, match="b is meta, a is cpu"):
        ops.all_gather_matmul(half(4, 16), w.t())


def test_one_rank_is_a_linear_layer():
    layer = nn.Linear(16, 24).half()
    x = half(2, 3, 16)
    want = layer(x)
    for kind in (ops.ColumnParallelLinear, ops.RowParallelLinear):
        for sequence in (True, False):
            torch.testing.assert_close(kind.shard(nn.Linear(16, 24), sequence=sequence).half()(x).shape, want.shape)
            copied = nn.Linear(16, 24).half()
            copied.load_state_dict(layer.state_dict())
            torch.testing.assert_close(kind.shard(copied, sequence=sequence)(x), want, rtol=1e-2, atol=1e-2)
