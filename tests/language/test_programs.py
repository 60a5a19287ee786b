# SPDX-License-Identifier: MIT
"""The reference programs, emulated on all their devices, against float64."""

import math

import pytest
import torch

import tilescale
from tests.language import programs


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("machine", ["h200-sxm-8", "b200-sxm-8"])
def test_tensor_parallel_gemm(devices: int, machine: str):
    func = programs.tensor_parallel_gemm(devices, 128, 192, 256)
    a, b = random(128, 256, dtype=torch.bfloat16), random(256, 192, dtype=torch.bfloat16, seed=1)
    shards = zip(a.chunk(devices, 1), b.chunk(devices, 0), strict=True)
    args = [[x.contiguous(), y.contiguous(), torch.full((128, 192), float("nan"))] for x, y in shards]
    tilescale.emulate(func, args, machine=machine)
    for _, _, c in args:
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("exchange", [programs.gathered, programs.exchanged], ids=["gather", "copy"])
@pytest.mark.parametrize("devices", [1, 4])
def test_context_parallel_mla(exchange, devices: int):
    batch, heads, seq, dim, pe_dim = 2, 32, 256, 64, 32
    func = programs.context_parallel_mla(devices, batch, heads, seq, dim, pe_dim, 16, 32, exchange)
    half = torch.float16
    q, q_pe = random(batch, heads, dim, dtype=half), random(batch, heads, pe_dim, dtype=half, seed=1)
    kv, k_pe = random(batch, seq, 1, dim, dtype=half, seed=2), random(batch, seq, 1, pe_dim, dtype=half, seed=3)
    shards = zip(kv.chunk(devices, 1), k_pe.chunk(devices, 1), strict=True)
    args = [
        [q.clone(), q_pe.clone(), x.contiguous(), y.contiguous(), torch.full((batch, heads, dim), float("nan"))]
        for x, y in shards
    ]
    tilescale.emulate(func, args)
    keys = torch.cat([kv, k_pe], -1)[:, :, 0].double()
    queries = torch.cat([q, q_pe], -1).double()
    scores = queries @ keys.transpose(1, 2) / math.sqrt(dim + pe_dim)
    wanted = scores.softmax(-1) @ kv[:, :, 0].double()
    for *_, output in args:
        torch.testing.assert_close(output.double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("rows", [32, 48])
def test_ring_shift(devices: int, rows: int):
    args = [
        [random(rows, 64, dtype=torch.float16, seed=rank), torch.zeros(rows, 64).half(), torch.zeros(rows // 16).int()]
        for rank in range(devices)
    ]
    tilescale.emulate(programs.ring_shift(), args)
    for rank, (_, received, flags) in enumerate(args):
        assert torch.equal(received, args[rank - 1][0]) and flags.tolist() == [1] * (rows // 16)


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_cluster_sum(cluster: int):
    x, sums = random(8, 64), torch.zeros(8)
    tilescale.emulate(programs.cluster_sum(cluster=cluster), [x, sums])
    torch.testing.assert_close(sums, x.sum(1))


def test_power_iteration():
    a, x = random(32, 32), torch.ones(32)
    args = [[rows.contiguous(), x.clone()] for rows in a.chunk(2)]
    tilescale.emulate(programs.power_iteration(), args)
    wanted = x.double()
    for _ in range(3):
        wanted = a.double() @ wanted
        wanted = wanted / wanted.abs().max()
    for _, got in args:
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
