# SPDX-License-Identifier: MIT
"""Routes as arrays equal those of `Machine.path`, for any network."""

import numpy as np
import pytest

from tilescale.collectives.routes import Routes
from tilescale.hda import Machine
from tilescale.hda.load import derive

TORUS = {"networks": {"fabric": {"topology": "torus", "dims": [4, 5]}}, "levels": {"core": {"count": 20}}}
RING = {"levels": {"chip": {"count": 7}}}
PIECE = {"networks": {"fabric": {"dims": [20, 101]}}, "levels": {"core": {"count": 20 * 101}}}
"""A piece of the wafer: on all of it a route has 1,700 links."""


def torus() -> Machine:
    return derive("wafer-mesh", "torus", TORUS)


CASES = {
    "one switch": (lambda: Machine.load("h200-sxm-8"), "device", range(8), {}),
    "some of a node": (lambda: Machine.load("h200-sxm-8"), "device", range(4), {"device": 4}),
    "nodes with ports": (lambda: Machine.load("h200-sxm-8x4"), "device", range(32), {}),
    "two devices of each node": (lambda: Machine.load("h200-sxm-8x4"), "device", range(8), {"device": 2, "node": 4}),
    "whole nodes": (lambda: Machine.load("h200-sxm-8x4"), "node", range(4), {}),
    "mesh": (lambda: derive("wafer-mesh", "piece", PIECE), "core", [0, 1, 100, 101, 102, 700, 2019], {}),
    "torus": (torus, "core", range(20), {}),
    "ring": (lambda: derive("stacked-3d", "ring", RING), "chip", range(7), {}),
    "mesh in a ring": (lambda: Machine.load("stacked-3d"), "vault", [0, 1, 9, 63, 64, 130, 255], {}),
    "links of a description": (lambda: Machine.load("mi300x-8"), "device", range(8), {}),
    "blocks of a cluster": (lambda: Machine.load("h200-sxm-8"), "block", range(4), {"block": 8, "cta_cluster": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_routes_are_those_of_the_machine(case: str):
    make, level, units, sizes = CASES[case]
    machine = make()
    routes = Routes(machine, level, units, sizes)
    n = len(units)
    source, target = (ends.ravel() for ends in np.meshgrid(np.arange(n), np.arange(n)))
    source, target = source[source != target], target[source != target]
    order = np.random.default_rng(0).permutation(len(source))
    bundle = routes.bundle(source[order], target[order])
    for i, (a, b) in enumerate(zip(source[order], target[order], strict=True)):
        end = bundle.begins[i + 1] if i + 1 < len(bundle.begins) else len(bundle.hops)
        found = [routes.hops[number] for number in bundle.hops[bundle.begins[i] : end]]
        links = [hop for hop in found if not hop.source.level.endswith("router") and "router" not in hop.target.level]
        path = machine.path(level, units[a], units[b], sizes=sizes)
        assert set(links) == set(path.hops) and len(links) == len(path.hops)
        assert bundle.latency[i] == pytest.approx(path.latency)
        assert routes.carriers[bundle.carrier[i]].mechanisms == path.mechanisms


def test_thread_groups_of_a_program_share_its_memory():
    machine = Machine.load("h200-sxm-8")
    routes = Routes(machine, "warpgroup", range(2), {"warpgroup": 2})
    bundle = routes.bundle(np.array([0, 1]), np.array([1, 0]))
    assert bundle.hops[0] == bundle.hops[1]
    assert routes.hops[bundle.hops[0]].bandwidth == machine.layer_for("shared").bandwidth


def test_a_core_of_the_wafer_sends_no_more_than_its_port_takes():
    routes = Routes(Machine.load("wafer-mesh"), "core", [758, 759, 757, 1], {})
    bundle = routes.bundle(np.array([0, 0, 0]), np.array([1, 2, 3]))
    ports = [hop for hop in bundle.hops if "router" in routes.hops[hop].target.level]
    assert len(ports) == 3 and len(set(ports)) == 1


def test_a_port_that_takes_all_of_its_routers_links_is_no_hop():
    links = Machine.load("wafer-mesh").network("core").link_bandwidth
    for share, ports in (1, 0), (0.99, 2):
        wide = derive("wafer-mesh", "wide", {"networks": {"fabric": {"bandwidth": f"{4 * links * share} B/s"}}})
        routes = Routes(wide, "core", [758, 759], {})
        bundle = routes.bundle(np.array([0]), np.array([1]))
        assert sum("router" in str(routes.hops[hop]) for hop in bundle.hops) == ports


def test_links_that_are_met_later_have_a_bandwidth_too():
    routes = Routes(Machine.load("h200-sxm-8"), "device", range(4), {})
    for pairs in ([0], [1]), ([2], [3]):
        routes.bundle(*map(np.array, pairs))
        assert routes.bandwidth.tolist() == [hop.bandwidth for hop in routes.hops]
