# SPDX-License-Identifier: MIT
"""Times of collectives: closed forms where the literature has them, contention where routes share links."""

from dataclasses import replace

import pytest

from tilescale.collectives import TENSORS, estimate, names
from tilescale.errors import UsageError
from tilescale.hda import Machine, Mechanism
from tilescale.hda.load import derive

GB, MIB = 1e9, 1 << 20
H200 = Machine.load("h200-sxm-8")


def switch(startup: float = 0.0, started_by: str = "program", **network: object) -> Machine:
    """Eight devices on one switch of 100 GB/s, their memory no limit."""
    only = Mechanism(name="wire", put=network.get("bandwidth", 100 * GB), startup=startup, started_by=started_by)
    nvlink = replace(
        H200.networks[1], **{"bandwidth": 100 * GB, "latency": 1e-6, "within": None, "mechanisms": (only,), **network}
    )
    memory = tuple(replace(layer, bandwidth=1e18, sustained=None) for layer in H200.memory)
    return replace(H200, networks=(nvlink,), memory=memory)


STEPS = {
    ("allreduce", "one_shot"): (1, 1, 7),
    ("allreduce", "two_shot"): (2, 2, 2 * 7 / 8),
    ("allreduce", "ring"): (0, 2 * 7, 2 * 7 / 8),
    ("allreduce", "nccl"): (0, 2 * 7, 2 * 7 / 8),
    ("allreduce", "tree"): (0, 2 * 3, 2),
    ("reduce_scatter", "direct"): (1, 1, 7 / 8),
    ("reduce_scatter", "ring"): (0, 7, 7 / 8),
    ("reduce_scatter", "nccl"): (0, 7, 7 / 8),
    ("all_gather", "direct"): (1, 1, 7 / 8),
    ("all_gather", "ring"): (0, 7, 7 / 8),
    ("all_gather", "nccl"): (0, 7, 7 / 8),
    ("all_to_all", "direct"): (1, 1, 7 / 8),
    ("all_to_all", "nccl"): (0, 7, 7 / 8),
    ("broadcast", "direct"): (1, 1, 7),
    ("broadcast", "tree"): (0, 3, 3),
    ("broadcast", "nccl"): (0, 7, 1),
}
"""(operation, algorithm) -> for 8 units: barriers and steps that follow one another, and how many times the whole
tensor the busiest unit sends, all pipelines cut finely (Thakur, Rabenseifner and Gropp, 2005)."""


@pytest.mark.parametrize(("operation", "impl"), STEPS, ids="-".join)
@pytest.mark.parametrize("startup", [0.0, 0.5e-6])
@pytest.mark.parametrize("nbytes", [0, 8 * MIB, 8 << 30])
def test_on_a_switch_rounds_take_what_the_literature_says(operation, impl, startup, nbytes):
    machine = switch(startup)
    network, (barriers, steps, share) = machine.networks[0], STEPS[operation, impl]
    latencies = (barriers + steps) * network.latency + steps * startup
    expected = network.setup(impl) + latencies + share * nbytes / network.bandwidth
    found = estimate(machine, "device", operation, impl, nbytes)
    assert found.algorithm == impl
    # The closed forms assume many pipeline segments and omit the steps that fill the pipeline; start-up is zero.
    pipelined = (operation, impl) in {("allreduce", "tree"), ("broadcast", "nccl")}
    if nbytes == 0:
        assert found.seconds <= expected
    else:
        assert expected * (1 - 1e-9) <= found.seconds <= expected * (1.0 + 1e-9 if not pipelined else 1.6)
    if pipelined and nbytes > GB:
        assert found.seconds <= expected * 1.05


def test_the_host_starts_copies_one_after_the_other():
    machine = switch(10e-6, "host")
    found = estimate(machine, "device", "all_gather", "copy_engine", 8 * MIB)
    assert found.seconds == pytest.approx(2e-6 + 7 * 10e-6 + 7 * MIB / (100 * GB))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ring_all_reduce_approaches_its_bound(n: int):
    nbytes, rate = 1 << 30, H200.network("device").mechanism("lsu").put
    found = estimate(H200, "device", "allreduce", "ring", nbytes, units=range(n), sizes={"device": n})
    bound = 2 * (n - 1) / n * nbytes / rate
    assert bound < found.seconds < 1.01 * bound
    assert found.nbytes == pytest.approx(2 * (n - 1) / n * nbytes)
    assert found.rounds == 2 * (n - 1)


def test_half_the_link_takes_twice_as_long():
    whole, half = (estimate(switch(bandwidth=b), "device", "allreduce", "ring", 1 << 30) for b in (100 * GB, 50 * GB))
    assert half.seconds == pytest.approx(2 * whole.seconds, rel=1e-3)


def test_bytes_over_links_are_counted():
    found = estimate(switch(), "device", "allreduce", "ring", 8 * MIB)
    assert len(found.link_bytes) == 16
    assert set(found.link_bytes.values()) == {14 * MIB}
    assert found.links == pytest.approx(dict.fromkeys(found.links, 14 * MIB / (100 * GB)))
    # A mechanism that reaches half of the link occupies it for twice as long.
    slow = switch()
    slow = replace(slow, networks=(replace(slow.networks[0], bandwidth=200 * GB),))
    again = estimate(slow, "device", "allreduce", "ring", 8 * MIB)
    assert again.seconds == pytest.approx(found.seconds) and again.links == pytest.approx(found.links)


# -- where routes share links ------------------------------------------------------------------------------------------


def mesh(rows: int, columns: int) -> Machine:
    changes = {"levels": {"core": {"count": rows * columns}}, "networks": {"fabric": {"dims": [rows, columns]}}}
    return derive("wafer-mesh", f"mesh {rows} x {columns}", changes)


def test_a_mesh_shows_contention():
    """All-to-all on a line of 8: half of all bytes cross the middle link, 16 messages each way."""
    machine, nbytes = mesh(1, 8), 8 * 4096
    fabric = machine.network("core")
    found = estimate(machine, "core", "all_to_all", "direct", nbytes)
    middle = 16 * 4096 / fabric.link_bandwidth
    assert found.seconds == pytest.approx(middle, rel=0.01)
    assert max(found.link_bytes.values()) == 16 * 4096
    # Two rows of four have two links in the middle.
    square = estimate(mesh(2, 4), "core", "all_to_all", "direct", nbytes)
    assert square.seconds == pytest.approx(middle / 2, rel=0.02)


def test_a_fat_tree_of_nodes_is_held_up_by_its_ports():
    """One ring crosses each border by one port; as many rings as ports use all of them."""
    cluster = Machine.load("h200-sxm-8x4")
    one, several, inside_first = (
        estimate(cluster, "device", "allreduce", name, 1 << 30).seconds for name in ("ring", "rings", "hierarchical")
    )
    port = 48.5 * GB
    assert one == pytest.approx(2 * 31 / 32 * (1 << 30) / port, rel=0.03)
    assert several == pytest.approx(one / (369 / 48.5), rel=0.12)
    assert inside_first < one / 4


def test_a_slow_memory_is_the_limit():
    slow = replace(H200, memory=tuple(replace(layer, bandwidth=50 * GB, sustained=None) for layer in H200.memory))
    nbytes = 1 << 30
    found = estimate(slow, "device", "all_gather", "ring", nbytes)
    # Each byte that is passed on is read here and written there.
    assert found.seconds == pytest.approx(2 * 7 / 8 * nbytes / (50 * GB), rel=0.01)


# -- large machines ----------------------------------------------------------------------------------------------------

CLUSTER = {"levels": {"node": {"count": 128}}}


def test_a_thousand_devices():
    machine = derive("h200-sxm-8x4", "h200-sxm-8x128", CLUSTER)
    direct = {"one_shot", "two_shot"}  # a million messages each
    algorithms = set(names("allreduce", TENSORS)) - direct
    found = {name: estimate(machine, "device", "allreduce", name, 1 << 28) for name in algorithms}
    assert found["ring"].rounds == 2 * 1023 and found["hierarchical"].rounds == 2 * (127 + 7)
    assert min(found.values(), key=lambda each: each.seconds).algorithm == "hierarchical_direct"
    small = {n: estimate(machine, "device", "allreduce", n, 4096).seconds for n in ("ring", "rings", "tree")}
    assert small["tree"] < small["ring"] / 50


def test_a_thousand_cores_of_a_mesh():
    machine = mesh(32, 32)
    ring, doubling, by_rows = (
        estimate(machine, "core", "allreduce", name, 32 * 1024).seconds
        for name in ("ring", "halving_doubling", "hierarchical")
    )
    assert by_rows < ring and by_rows < doubling


def test_units_and_shape_may_be_given():
    cluster = Machine.load("h200-sxm-8x4")
    inside = estimate(cluster, "device", "allreduce", "ring", MIB, units=range(8, 16))
    across = estimate(cluster, "device", "allreduce", "ring", MIB, units=range(0, 32, 4))
    assert {link.network for link in inside.links} == {"nvlink"}
    assert {link.network for link in across.links} == {"nvlink", "infiniband"}
    one = estimate(cluster, "device", "allreduce", "hierarchical", MIB, units=[3])
    assert one.seconds == 0 and one.links == {}
    flat = estimate(H200, "device", "allreduce", "hierarchical", MIB, shape=(2, 4))
    assert flat.rounds == 2 * (3 + 1)


def test_warpgroups_exchange_through_shared_memory():
    found = estimate(H200, "warpgroup", "allreduce", "one_shot", 64 << 10, units=(0, 1), sizes={"warpgroup": 2})
    layer = H200.layer_for("shared")
    assert found.seconds == pytest.approx(2 * layer.latency + 2 * (64 << 10) / layer.bandwidth)


def test_an_unknown_algorithm_is_an_error():
    with pytest.raises(UsageError, match="no algorithm 'star' for allreduce"):
        estimate(H200, "device", "allreduce", "star", MIB)


@pytest.mark.parametrize("machine", ["h200-sxm-8x4", "mi300x-8", "stacked-3d"])
@pytest.mark.parametrize("operation", ["allreduce", "all_to_all", "broadcast"])
def test_no_link_carries_more_than_it_can(machine: str, operation: str):
    """And bytes arrive: what a unit is sent crosses its links."""
    found = Machine.load(machine)
    level, nbytes = found.networks[-1].level, 1 << 24
    count = found.count(level)
    for name in names(operation):
        each = estimate(found, level, operation, name, nbytes)
        assert each.seconds >= max(each.links.values()) * (1 - 1e-9), name
        least = {"allreduce": 2 * (count - 1), "all_to_all": count - 1, "broadcast": count - 1}[operation]
        assert sum(each.link_bytes.values()) >= least * nbytes * (1 - 1e-9), name
        bandwidth = {link: each.link_bytes[link] / each.links[link] for link in each.links}
        assert all(bandwidth[link] <= found.network(level).bandwidth * (1 + 1e-9) for link in bandwidth), name


def test_eight_devices_take_no_longer_than_what_is_aimed_at():
    """All-reduces by the algorithms that there is code for."""
    machine = Machine.load("h200-sxm-8")
    for nbytes, aim in ((64 << 10, 7e-6), (256 << 20, 1.30e-3)):
        plans = [estimate(machine, "device", "allreduce", name, nbytes) for name in ("one_shot", "two_shot")]
        assert min(plan.seconds for plan in plans) <= aim
