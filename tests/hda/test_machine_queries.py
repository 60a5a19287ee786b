# SPDX-License-Identifier: MIT
"""Every built-in machine answers every query; known machines give known numbers."""

import dataclasses

import pytest

from tilescale.errors import UnknownLayerError, UnknownLevelError, UnsupportedError, UsageError
from tilescale.hda import Machine

KIB = 1024
REQUIRED = {
    "h100-sxm-8", "h200-sxm-8", "a100-sxm-8", "b200-sxm-8", "gb200-nvl72", "mi300x-8",
    "rtx4090-pcie-2", "h200-sxm-8x4", "cpu-node", "wafer-mesh", "stacked-3d",
}  # fmt: skip


def test_all_promised_machines_are_built_in():
    assert set(Machine.names()) >= REQUIRED


@pytest.mark.parametrize("name", Machine.names())
def test_a_built_in_machine_answers_every_query(name):
    machine = Machine.load(name)
    assert machine.name == name and machine.title and machine.description
    program, owner = machine.program_level, machine.tensor_level
    assert machine.index(machine.level_names[0]) == 0 and machine.level(owner.name) is owner
    for scope in ("fragment", "shared", "global"):
        layer = machine.layer_for(scope)
        assert 0 < machine.capacity(layer.name) <= layer.capacity
        assert machine.layer(layer.name) is layer
    assert machine.program_units * machine.count(owner.name) == machine.count(program.name)
    assert machine.residency(threads=1) >= 1
    assert machine.residency(threads=1, shared_bytes=2**50) == 0
    assert machine.rates(owner.name) and machine.digest
    if machine.count(owner.name) > 1:
        path = machine.path(owner.name, 0, machine.count(owner.name) - 1)
        assert path.hops and path.bandwidth > 0 and path.latency > 0 and path.mechanisms
        assert machine.connects(owner.name)
        assert path.time(1 << 20) > path.latency


@pytest.mark.parametrize("name", Machine.names())
def test_every_number_has_a_source(name):
    machine = Machine.load(name)
    parts = [*machine.memory, *machine.networks]
    parts += [unit for level in machine.levels for unit in level.compute]
    # One thread, one server: true by definition.
    parts += [level for level in machine.levels if 1 not in (level.threads, level.count)]
    for part in parts:
        assert part.source, part.name


def test_rates_are_those_of_the_data_sheets():
    tera = 1e12
    for name, level, unit, dtype, rate in [
        ("h100-sxm-8", "device", "tensor", "bfloat16", 989.4),
        ("h200-sxm-8", "device", "tensor", "float8_e4m3", 1979),
        ("h200-sxm-8", "device", "vector", "float32", 66.9),
        ("a100-sxm-8", "device", "tensor", "float16", 312),
        ("b200-sxm-8", "device", "tensor", "float4_e2m1", 9000),
        ("gb200-nvl72", "device", "tensor", "float16", 2500),
        ("mi300x-8", "device", "tensor", "float16", 1307),
        ("rtx4090-pcie-2", "device", "vector", "float32", 82.6),
    ]:
        assert Machine.load(name).rate(level, unit, dtype) == pytest.approx(rate * tera, rel=0.005), name


def test_rate_scales_with_the_units_of_a_level():
    machine = Machine.load("h200-sxm-8")
    block = machine.rate("block", "tensor", "float16")
    assert machine.rate("device", "tensor", "float16") == pytest.approx(132 * block)
    assert machine.rate("cta_cluster", "tensor", "float16") == pytest.approx(8 * block)
    assert machine.rate("node", "tensor", "float16") == pytest.approx(8 * 132 * block)
    assert machine.rate("block", "tensor", "float16", sustained=True) == pytest.approx(0.8 * block)
    assert machine.rate("block", "tensor", "float8_e4m3fnuz") == machine.rate("block", "tensor", "float8_e4m3")


def test_rates_given_for_a_coarse_level_divide(describe):
    compute = "    compute:\n      vector:\n        rates:\n          float32: 16 op/clock\n"
    path = describe((compute, ""), ("    count: 6\n", "    count: 6\n" + compute.replace("16 op/clock", "64 GFLOP/s")))
    assert Machine.load(path).rate("core", "vector", "float32") == pytest.approx(16e9)


def test_what_does_not_exist_is_named_with_what_does():
    machine = Machine.load("h200-sxm-8")
    with pytest.raises(UnknownLevelError, match=r"did you mean 'device'.*warpgroup"):
        machine.level("devise")
    with pytest.raises(UnknownLayerError, match=r"l1 \(shared memory\)"):
        machine.layer("l7")
    with pytest.raises(UnsupportedError, match="tensor, tensor64, vector, special"):
        machine.rate("device", "matrix", "float16")
    with pytest.raises(UnsupportedError, match="computes in float8_e4m3"):
        machine.rate("device", "tensor", "float32")
    with pytest.raises(UsageError, match="rate of a block"):
        machine.rate("warp", "tensor", "float16")
    with pytest.raises(UsageError, match="coarser"):
        machine.count("device", "block")


def test_counts():
    machine = Machine.load("h200-sxm-8x4")
    assert machine.count("device") == 32 and machine.count("device", "node") == 8
    assert machine.count("block", "device") == 132 and machine.count("block") == 132 * 32
    assert machine.count("block", "cta_cluster") == 8 and machine.count("cta_cluster", "device") == 16
    assert machine.count("warp", "warpgroup") == 4 and machine.count("thread", "block") == 1024
    assert machine.count("node", "node") == 1
    wafer = Machine.load("wafer-mesh")
    assert wafer.count("core", "wafer") == 996 * 757 and wafer.count("lane", "core") == 1


def test_tensor_level_is_where_global_memory_is():
    found = {name: Machine.load(name).tensor_level.name for name in Machine.names()}
    assert found["h200-sxm-8"] == "device" and found["wafer-mesh"] == "core"
    assert found["stacked-3d"] == "vault" and found["cpu-node"] == "socket"


@pytest.mark.parametrize(
    ("name", "program", "resident"),
    [
        ("h100-sxm-8", {"threads": 128, "shared_bytes": 48 * KIB}, 4),
        ("h100-sxm-8", {"threads": 128, "shared_bytes": 227 * KIB}, 1),
        ("h100-sxm-8", {"threads": 128, "shared_bytes": 227 * KIB + 1}, 0),
        # Two of 113 KiB fit with the 1 KiB that each is charged, two of 114 KiB do not.
        ("h100-sxm-8", {"threads": 128, "shared_bytes": 113 * KIB}, 2),
        ("h100-sxm-8", {"threads": 128, "shared_bytes": 114 * KIB}, 1),
        ("h100-sxm-8", {"threads": 32}, 32),
        ("h100-sxm-8", {"threads": 33}, 32),
        ("h100-sxm-8", {"threads": 65}, 21),
        ("h100-sxm-8", {"threads": 1024}, 2),
        ("h100-sxm-8", {"threads": 1025}, 0),
        # The occupancy calculator: 256 threads of 168 registers, rounded up per warp.
        ("h100-sxm-8", {"threads": 256, "registers_per_thread": 168}, 1),
        ("h100-sxm-8", {"threads": 256, "registers_per_thread": 128}, 2),
        ("h100-sxm-8", {"threads": 128, "registers_per_thread": 33}, 12),
        ("h100-sxm-8", {"threads": 128, "registers_per_thread": 255}, 2),
        ("h100-sxm-8", {"threads": 128, "registers_per_thread": 256}, 0),
        ("h100-sxm-8", {"threads": 128, "fragment_bytes": 128 * 128 * 4}, 4),
        ("h100-sxm-8", {"threads": 128, "fragment_bytes": 128 * 256 * 4}, 0),
        ("a100-sxm-8", {"threads": 128, "shared_bytes": 48 * KIB}, 3),
        ("rtx4090-pcie-2", {"threads": 512}, 3),
        ("mi300x-8", {"threads": 256, "shared_bytes": 32 * KIB}, 2),
        # One memory for all: capacity that one part takes is missing for another.
        ("wafer-mesh", {"threads": 1, "shared_bytes": 20 * KIB, "fragment_bytes": 20 * KIB}, 1),
        ("wafer-mesh", {"threads": 1, "shared_bytes": 21 * KIB, "fragment_bytes": 20 * KIB}, 0),
    ],
)
def test_residency(name, program, resident):
    assert Machine.load(name).residency(**program) == resident


def test_capacity_of_a_tile():
    machine = Machine.load("h200-sxm-8")
    assert machine.capacity("l1") == 227 * KIB
    assert machine.capacity("l0") == 256 * KIB and machine.capacity("l0", threads=128) == 128 * 1020
    assert machine.capacity("l2") == 143771 * KIB * KIB


def test_capabilities():
    machine = Machine.load("h200-sxm-8")
    assert machine.has("wgmma") and machine.has("wgmma", "warpgroup") and not machine.has("wgmma", "block")
    assert machine.has("tma", "block") and not Machine.load("a100-sxm-8").has("tma")
    # Multicast over NVLink is left out where systems may forbid it; that between the blocks of a cluster is not.
    assert not machine.has("multicast", "device") and machine.has("multicast", "block")
    described = dataclasses.replace(machine, capabilities=("confidential",))
    assert described.has("confidential") and not described.has("confidential", "device")


def test_networks_between_units():
    machine = Machine.load("h200-sxm-8x4")
    assert machine.network("device").name == "nvlink" and machine.network("node").name == "infiniband"
    assert machine.network("block", "device") is None and machine.network("warp") is None
    assert machine.network("block").reaches == "l1" and machine.network("device").reaches == "l2"
    assert machine.connects("device", "node") and machine.connects("device")
    assert machine.connects("block", "cta_cluster") and not machine.connects("block", "device")
    assert not machine.connects("cta_cluster", "device")
    rack = Machine.load("gb200-nvl72")
    assert rack.network("device").within is None and rack.network("device", "node").name == "nvlink"


def test_measured_bandwidth_of_a_link():
    nvlink = Machine.load("h200-sxm-8").network("device")
    assert nvlink.bandwidth == 450e9 and nvlink.latency == pytest.approx(1.2e-6)
    assert nvlink.mechanism("tma").rate("put") == 360e9 and nvlink.mechanism("tma").rate("reduce") == 325e9
    assert nvlink.mechanism("copy_engine").rate("reduce") is None and nvlink.mechanism("none") is None
    assert nvlink.mechanism("lsu").bandwidth == 369e9
