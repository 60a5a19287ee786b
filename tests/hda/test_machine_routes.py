# SPDX-License-Identifier: MIT
"""Paths over every topology, across levels and networks, and the errors where there is none."""

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilescale.errors import NoPathError, PeerOutOfRangeError, UnknownLevelError, UnsupportedError, UsageError
from tilescale.hda import Machine, Network, topology


def units(path):
    """Numbers of the units on the path, without switches."""
    return [path.hops[0].source.number, *(hop.target.number for hop in path.hops if hop.target.level == path.level)]


def with_topology(describe, text):
    return Machine.load(describe(("topology: ring", text)))


def test_a_unit_reaches_itself_without_hops():
    path = Machine.load("h200-sxm-8").path("device", 3, 3)
    assert path.hops == () and path.latency == 0 and path.bandwidth == float("inf") and path.time(1 << 30) == 0


def test_switch():
    path = Machine.load("h200-sxm-8").path("device", 3, 5)
    assert [str(hop) for hop in path.hops] == [
        "device 3 -> nvlink switch 0 (nvlink)",
        "nvlink switch 0 -> device 5 (nvlink)",
    ]
    assert path.bandwidth == 450e9 and path.latency == pytest.approx(1.2e-6)
    assert path.networks == ("nvlink",) and path.reaches == "l2"
    assert [m.name for m in path.mechanisms] == ["tma", "lsu", "copy_engine", "nvshmem"]


def test_transfers_that_share_a_port_share_a_hop():
    machine = Machine.load("h200-sxm-8")
    assert machine.path("device", 3, 5).hops[0] == machine.path("device", 3, 6).hops[0]
    assert machine.path("device", 3, 5).hops[1] == machine.path("device", 4, 5).hops[1]


def test_ring_takes_the_shorter_way(describe):
    machine = Machine.load(describe())
    assert units(machine.path("chip", 0, 2)) == [0, 1, 2]
    assert units(machine.path("chip", 1, 5)) == [1, 0, 5]
    path = machine.path("chip", 0, 3)
    # Two links a chip; half of its bandwidth each, and the mechanism's share of that.
    assert path.bandwidth == pytest.approx(50e9) and path.latency == pytest.approx(3e-6)
    assert path.mechanisms[0].put == pytest.approx(45e9) and path.mechanisms[0].get == pytest.approx(40e9)


def test_mesh_goes_along_the_fastest_dimension_first(describe):
    machine = with_topology(describe, "topology: mesh\n    dims: [2, 3]")
    assert units(machine.path("chip", 0, 5)) == [0, 1, 2, 5]
    assert units(machine.path("chip", 5, 0)) == [5, 4, 3, 0]
    assert machine.path("chip", 0, 2).latency == pytest.approx(2e-6)


def test_torus_wraps_around(describe):
    machine = with_topology(describe, "topology: torus\n    dims: [2, 3]")
    assert units(machine.path("chip", 0, 2)) == [0, 2]


def test_point_to_point_has_a_link_per_pair():
    path = Machine.load("mi300x-8").path("device", 0, 7)
    assert len(path.hops) == 1 and path.bandwidth == pytest.approx(64e9)
    # Measured: 48 of 64 GB/s.
    assert path.mechanisms[0].put == pytest.approx(48e9)


GRAPH = """topology: graph
    link_bandwidth: 10 GB/s
    links:
      - between: [0, 1]
      - between: [1, 2]
        bandwidth: 40 GB/s
      - between: [2, 3]
      - between: [4, 5]"""


BRIDGE = """\
  bridge:
    level: chip
    topology: graph
    bandwidth: 5 GB/s
    latency: 4 us
    reaches: l1
    links:
      - between: [3, 4]
    mechanisms:
      dma:
        put: 100 %
        startup: 3 us
"""


def test_graph(describe):
    machine = with_topology(describe, GRAPH)
    path = machine.path("chip", 0, 3)
    assert units(path) == [0, 1, 2, 3]
    assert [hop.bandwidth for hop in path.hops] == [10e9, 40e9, 10e9] and path.bandwidth == 10e9
    with pytest.raises(NoPathError, match="chip 0 and chip 4"):
        machine.path("chip", 0, 4)


def test_routes_over_several_networks(describe):
    machine = Machine.load(describe(("topology: ring", GRAPH), ("networks:\n", f"networks:\n{BRIDGE}")))
    path = machine.path("chip", 0, 5)
    assert units(path) == [0, 1, 2, 3, 4, 5] and path.networks == ("wire", "bridge")
    assert path.bandwidth == 5e9 and path.latency == pytest.approx(8e-6)
    assert path.mechanisms[0].put == pytest.approx(5e9) and path.mechanisms[0].get is None
    assert path.mechanisms[0].startup == pytest.approx(5e-6), "each network on the way is started"
    assert path.time(5e9, "dma") == pytest.approx(1 + 13e-6)


def test_between_nodes_each_device_has_its_own_port():
    machine = Machine.load("h200-sxm-8x4")
    path = machine.path("device", 3, 17)
    assert path.networks == ("infiniband",) and path.bandwidth == 50e9
    assert [(hop.source, hop.target) for hop in path.hops] == [
        (("device", 3), ("infiniband switch", 0)),
        (("infiniband switch", 0), ("device", 17)),
    ]
    assert path.mechanisms[0].name == "rdma" and path.mechanisms[0].put == pytest.approx(48.5e9)
    assert machine.path("node", 0, 2).bandwidth == 400e9
    assert machine.path("device", 8, 15).hops[0].target == ("nvlink switch", 1)
    # A rack with one NVLink domain needs no other network between its nodes.
    assert Machine.load("gb200-nvl72").path("device", 0, 71).networks == ("nvlink",)


def test_programs_of_other_devices_are_reached_through_their_devices():
    path = Machine.load("h200-sxm-8").path("block", 0, 140)
    assert path.networks == ("nvlink",) and path.hops[0].source == ("device", 0)


def test_programs_of_a_cluster():
    machine = Machine.load("h200-sxm-8")
    assert machine.path("block", 0, 7).networks == ("dsmem",)
    with pytest.raises(NoPathError, match=r"block 0 and block 8[^$]*cta_cluster 0 and 1.*l2 \(HBM3e\)"):
        machine.path("block", 0, 8)
    launch = {"device": 4, "cta_cluster": 2, "block": (8, 16)}
    assert machine.path("block", 2, 3, sizes=launch).reaches == "l1"
    with pytest.raises(NoPathError):
        machine.path("block", 1, 2, sizes=launch)
    # A launch without clusters links no blocks.
    with pytest.raises(NoPathError):
        machine.path("block", 0, 1, sizes={"block": 64})
    # Block 128 is the first of device 1.
    assert machine.path("block", 0, 128, sizes=launch).hops[1].target == ("device", 1)


def test_clusters_of_two_devices():
    machine = Machine.load("h200-sxm-8")
    path = machine.path("cta_cluster", 0, 8, sizes={"cta_cluster": 4, "block": 32})
    assert path.networks == ("nvlink",) and path.hops[1].target == ("device", 1)
    with pytest.raises(NoPathError):
        machine.path("cta_cluster", 0, 7, sizes={"cta_cluster": 4, "block": 32})


def test_thread_groups_of_a_program_need_no_network():
    machine = Machine.load("h200-sxm-8")
    path = machine.path("warpgroup", 0, 1)
    assert path.hops == () and path.reaches == "l1" and path.bandwidth == machine.layer("l1").bandwidth
    with pytest.raises(NoPathError, match="units of level 'block'"):
        machine.path("warpgroup", 0, 8)
    with pytest.raises(NoPathError):
        machine.path("warpgroup", 1, 2, sizes={"warpgroup": 2})


def test_a_launch_uses_a_part_of_the_machine():
    machine = Machine.load("h200-sxm-8x4")
    # Four devices of each node: number 5 is the second of node 1.
    path = machine.path("device", 5, 3, sizes={"device": 4})
    assert path.hops[0].source == ("device", 9) and path.networks == ("infiniband",)
    with pytest.raises(PeerOutOfRangeError, match="no device 16: there are 16"):
        machine.path("device", 0, 16, sizes={"device": 4})
    with pytest.raises(UsageError, match="asks for 9 units"):
        machine.path("device", 0, 1, sizes={"device": 9})
    with pytest.raises(UnknownLevelError):
        machine.path("device", 0, 1, sizes={"gpu": 2})
    with pytest.raises(PeerOutOfRangeError):
        machine.path("device", -1, 0)


def test_a_launch_shape_takes_the_corner_of_a_mesh():
    machine = Machine.load("wafer-mesh")
    path = machine.path("core", 0, 5, sizes={"core": (4, 4)})
    assert units(path) == [0, 1, 757 + 1]
    assert units(machine.path("core", 0, 5, sizes={"core": 16})) == [0, 1, 2, 3, 4, 5]
    assert len(machine.path("core", 0, machine.count("core") - 1).hops) == 995 + 756
    with pytest.raises(UsageError, match="does not fit"):
        machine.path("core", 0, 5, sizes={"core": (4, 800)})


def test_time_of_a_transfer():
    path = Machine.load("h200-sxm-8").path("device", 0, 1)
    assert path.time(360e9 * 1e-3, "tma") == pytest.approx(1e-3 + 1.7e-6)
    # Measured by size: the copy engine takes 10.6 us for 64 KiB and 12.5 us for 1 MiB.
    assert path.time(1 << 16, "copy_engine") == pytest.approx(10.6e-6, rel=0.05)
    assert path.time(1 << 20, "copy_engine") == pytest.approx(12.5e-6, rel=0.05)
    assert path.time(1 << 30) == path.time(1 << 30, "copy_engine") and path.time(1 << 10) == path.time(1 << 10, "lsu")
    assert path.time(1 << 30, operation="reduce") == path.time(1 << 30, "tma", "reduce")
    with pytest.raises(UnsupportedError, match="tma, lsu, copy_engine"):
        path.time(1, "rdma")
    with pytest.raises(UnsupportedError, match="reduce by copy_engine"):
        path.time(1, "copy_engine", "reduce")


@settings(deadline=None)
@given(st.sampled_from(["ring", "mesh", "torus"]), st.integers(1, 5), st.integers(1, 5), st.data())
def test_regular_routes_are_shortest(kind, rows, columns, data):
    count = rows * columns
    dims = () if kind == "ring" else (rows, columns)
    net = Network(name="n", level="u", topology=kind, bandwidth=1.0, latency=1.0, mechanisms=(), reaches="m", dims=dims)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(topology.edges(net, count))
    a, b = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    steps = topology.route(net, count, a, b)
    assert steps[0] == a and steps[-1] == b and networkx.is_path(graph, steps) or a == b
    assert len(steps) - 1 == networkx.shortest_path_length(graph, a, b)


# -- which of several networks, and over several of them ---------------------------------------------------------------

NODES = ("memory:\n", "  node:\n    kind: unit\n    count: 3\nmemory:\n"), ("count: 6", "count: 4")
"""Edits of the small machine's description: four chips in each of three nodes."""
RINGS = *NODES, ("    level: chip\n    topology", "    level: chip\n    within: node\n    topology")
"""and a ring in each of these."""


def network(name, level, topology, latency="1 us", bandwidth="100 GB/s"):
    """A description of a network, in front of the small one's."""
    text = f"  {name}:\n    level: {level}\n    topology: {topology}\n    bandwidth: {bandwidth}\n"
    text += f"    latency: {latency}\n    reaches: l1\n    mechanisms:\n      dma:\n        put: 100 %\n"
    return ("networks:\n", f"networks:\n{text}")


def graph(*links, rates=()):
    """A topology of these links, some with a bandwidth of their own."""
    listed = [f"\n      - between: [{a}, {b}]" for a, b in links]
    listed += [f"\n      - between: [{a}, {b}]\n        bandwidth: {rate}" for a, b, rate in rates]
    return f"graph\n    links:{''.join(listed)}"


@pytest.mark.parametrize(
    ("network_of_links", "taken"),
    [
        # 1 MiB takes 10.5 us over the wire, and a latency of 1 us: what decides is the sum of the two.
        (network("other", "chip", graph((0, 1)), "9 us", "200 GB/s"), "wire"),
        (network("other", "chip", graph((0, 1)), "5 us", "200 GB/s"), "other"),
        # and the narrowest link on the path, from 0 to 2: 10.5 us after 2 us, or 21 us after 2 us
        (network("other", "chip", graph(rates=[(0, 1, "50 GB/s"), (1, 2, "400 GB/s")])), "wire"),
    ],
)
def test_of_several_networks_the_one_with_the_shortest_time(describe, network_of_links, taken):
    target = 2 if "400" in network_of_links[1] else 1
    machine = Machine.load(
        describe(network_of_links, ("topology: ring", "topology: ring\n    link_bandwidth: 100 GB/s"))
    )
    assert machine.path("chip", 0, target).networks == (taken,)


def test_a_ring_in_each_node(describe):
    machine = Machine.load(describe(*RINGS))
    assert units(machine.path("chip", 5, 7)) in ([5, 4, 7], [5, 6, 7]) and units(machine.path("chip", 4, 5)) == [4, 5]


def test_from_a_ring_in_one_node_to_that_of_another(describe):
    """Chips 1 and 6 are joined: the path is along the first node's ring, over, and along the second's."""
    machine = Machine.load(describe(*RINGS, network("bridge", "chip", graph((1, 6)))))
    path = machine.path("chip", 0, 7)
    assert units(path) == [0, 1, 6, 7] and path.networks == ("wire", "bridge")


def test_between_nodes_that_no_single_network_joins(describe):
    """Out of one node, over two networks of nodes, and into the other: entry and exit are not hops."""
    here, there = network("here", "node", graph((0, 1))), network("there", "node", graph((1, 2)))
    machine = Machine.load(describe(*RINGS, here, there))
    assert [str(hop) for hop in machine.path("chip", 2, 9).hops] == [
        "node 0 -> node 1 (here)",
        "node 1 -> node 2 (there)",
    ]
    assert [str(hop) for hop in machine.path("chip", 9, 2).hops] == [
        "node 2 -> node 1 (there)",
        "node 1 -> node 0 (here)",
    ]


def test_of_two_alike_links_on_a_searched_route_the_first_described(describe):
    alike = [network(name, "chip", graph((3, 4))) for name in ("second", "first")]
    machine = Machine.load(describe(*alike, ("topology: ring", GRAPH)))
    assert machine.path("chip", 0, 5).networks == ("wire", "first")


@pytest.mark.parametrize(("limit", "found"), [(5, False), (6, True)])
def test_routes_are_searched_up_to_a_number_of_units(describe, monkeypatch, limit, found):
    monkeypatch.setattr("tilescale.hda.route.SEARCH_LIMIT", limit)
    machine = Machine.load(describe(("topology: ring", GRAPH), ("networks:\n", f"networks:\n{BRIDGE}")))
    if found:
        assert machine.path("chip", 0, 5).networks == ("wire", "bridge")
    else:
        with pytest.raises(NoPathError):
            machine.path("chip", 0, 5)


def test_one_network_of_too_many_units_is_enough_not_to_search(describe, monkeypatch):
    bridge, far = network("bridge", "chip", graph((1, 6))), network("far", "node", graph((0, 2)))
    machine = Machine.load(describe(*RINGS, bridge, far))
    monkeypatch.setattr("tilescale.hda.route.SEARCH_LIMIT", 11)  # of 12 chips and 3 nodes
    with pytest.raises(NoPathError):
        machine.path("chip", 0, 7)
