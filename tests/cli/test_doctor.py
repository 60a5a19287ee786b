# SPDX-License-Identifier: MIT
"""`tilescale doctor`: every check reports, defects come with a remedy, and ranks of a job are checked together."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tilescale import backends
from tilescale.cli import main
from tilescale.cli.doctor import command, host, job
from tilescale.cli.doctor.finding import Finding, ask
from tilescale.comm import World
from tilescale.comm.binding import Adapters, Binding
from tilescale.errors import DeviceError, LaunchError

FINE, BROKEN = Finding("one", True, "all right"), Finding("two", False, "not there", "get it")
EITHER = Finding("three", None, "not needed", "if you want it: get it")


def test_for_people(monkeypatch) -> None:
    monkeypatch.setattr(host, "findings", lambda: iter([FINE, BROKEN, EITHER]))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[:2] == [["yes", "one", "all", "right"], ["NO", "two", "not", "there"]]
    assert lines[2] == ["->", "get", "it"] and lines[4][0] == "->"


def test_as_json(monkeypatch) -> None:
    monkeypatch.setattr(host, "findings", lambda: iter([FINE, EITHER]))
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0
    assert [Finding(**row) for row in json.loads(done.output)] == [FINE, EITHER]


def test_a_check_that_breaks_has_found_something() -> None:
    def refused() -> Finding:
        raise DeviceError("no driver", hint="install one")

    assert ask("x", refused) == Finding("x", False, "no driver", "install one")
    assert ask("y", lambda: 1 / 0) == Finding("y", False, "ZeroDivisionError: division by zero")


def test_every_check_of_a_machine_answers() -> None:
    found = {finding.name: finding for finding in host.findings()}
    assert len(found) == 17 and found["versions"].works and found["heap host"].works
    assert all(finding.remedy for finding in found.values() if finding.works is False)


@pytest.mark.parametrize(
    ("driver", "built", "works"),
    [(("580.65", "13.0"), "12.8", True), (("570.1", "12.8"), "13.0", False), (("570.1", "12.8"), None, False)],
)
def test_a_driver_too_old_for_pytorch(monkeypatch, driver: tuple[str, str], built: str | None, works: bool) -> None:
    monkeypatch.setattr("tilescale.hda.nvml.driver", lambda: None)
    assert host._driver().works is None
    monkeypatch.setattr("tilescale.hda.nvml.driver", lambda: driver)
    monkeypatch.setattr("torch.version.cuda", built)
    found = host._driver()
    assert found.works is works and found.found.startswith(f"{driver[0]}, for CUDA up to {driver[1]}")


def test_adapters_between_hosts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host, "_INFINIBAND", tmp_path)
    assert host._adapters().works is None
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    found = host._adapters()
    assert not found.works and found.found == "1 of 2 ports are active, not that of mlx5_1"
    assert "subnet manager" in found.remedy


def test_the_adapters_that_ranks_would_be_bound_to(monkeypatch) -> None:
    def bound(env: dict[str, str]) -> Binding:
        return Binding(0, adapters=Adapters((("mlx5_0:1", "mlx5_1:1"), ("mlx5_2:1",))[: int(env["LOCAL_WORLD_SIZE"])]))

    monkeypatch.setattr("tilescale.comm.binding.binding_of", bound)
    monkeypatch.setattr("tilescale.hda.nvml.accelerators", lambda: ())
    assert host._binding().works is None and host._binding().found == "no GPU"
    monkeypatch.setattr("tilescale.hda.nvml.accelerators", lambda: (None, None))
    found = host._binding()
    assert found.works and found.found.endswith("GPU 0 - mlx5_0:1 and mlx5_1:1, GPU 1 - mlx5_2:1")


def test_a_job_that_cannot_be_joined(monkeypatch) -> None:
    def refuse() -> World:
        raise LaunchError("nobody there", hint="start rank 0")

    monkeypatch.setattr("tilescale.comm.init", refuse)
    assert list(command._of_job()) == [Finding("joining", False, "nobody there", "start rank 0")]


def test_ranks_check_together(run_ranks, monkeypatch) -> None:
    def work(team) -> list[Finding]:
        world = World(ranks=(0, 1), rank=team.rank, launcher="test", node_of=(0, 0), _session=team._session)
        return list(job.findings(world))

    first, second = run_ranks(2, work)
    names = [finding.name for finding in first]
    assert names == ["ranks", "devices", "binding", "ports", "store", "clocks", "heap", "NCCL"]
    assert [f.works for f in first] == [f.works for f in second]
    assert all(finding.works for finding in first if finding.name not in {"binding", "ports", "store", "NCCL"}), first


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ((1.0, 1.0), ""),
        ((1.0, 3.0), "rank 1: a wrong sum: [3.0]"),
        ((None, 1.0), "rank 0: no result within 0.2 s"),
        ((RuntimeError("no way"), 1.0), "rank 0: no way"),
    ],
)
def test_nccl_between_all_ranks(monkeypatch, sums: tuple, said: str) -> None:
    """Each rank may have a sum, an error, or nothing in time."""
    aborted: list[int] = []
    told: list[str] = []

    def added_up(world) -> float:
        if isinstance(sums[world.rank], RuntimeError):
            raise sums[world.rank]
        if sums[world.rank] is None:
            time.sleep(2)
        return sums[world.rank]

    def all_gather(own: str) -> list[str]:
        told.append(own)
        return [*told, ""][:2]

    monkeypatch.setattr(job, "_added_up", added_up)
    monkeypatch.setattr(job, "_NCCL_WITHIN_S", 0.2)
    services = replace(backends.device_services(), abort=lambda: aborted.append(1))
    monkeypatch.setattr(backends, "device_services", lambda: services)
    device = SimpleNamespace(type="cuda")
    for rank in range(2):
        found = job._nccl(SimpleNamespace(rank=rank, size=2, device=device, all_gather=all_gather))
    assert found.works == (not said) and (said in found.found if said else "right" in found.found)
    assert len(aborted) == sum(not isinstance(one, float) for one in sums)
    assert job._nccl(SimpleNamespace(device=SimpleNamespace(type="cpu"))).works is None


@pytest.mark.parametrize(
    ("lists", "works"),
    [((None, None, None), None), (("=a", "=a", "=b"), True), (("=a", "=b", "=b"), False), (("=a", None, "=b"), False)],
)
def test_ranks_of_a_node_need_the_same_adapters_of_nccl(lists: tuple[str | None, ...], works: bool | None) -> None:
    """Ranks 0 and 1 are on one node, rank 2 is on another."""
    told = [(4, dict.fromkeys(job._ADAPTERS) | {"NCCL_IB_HCA": text}) for text in lists]
    world = SimpleNamespace(all_gather=lambda own: told, node_of=(0, 0, 1), nodes=2)
    found = job._binding(world)
    assert found.works is works and found.found.startswith("rank 0: 4 cores")
    assert ("NCCL_IB_HCA==b" in found.found) == ("=b" in lists)


@pytest.mark.parametrize(("nodes", "works"), [((0, 0), None), ((0, 1), False)])
def test_ports_that_are_closed(run_ranks, monkeypatch, nodes: tuple[int, ...], works: bool | None) -> None:
    monkeypatch.setattr(job, "_reaches", lambda address: False)

    def work(team) -> Finding:
        return job._ports(World(ranks=(0, 1), rank=team.rank, launcher="test", node_of=nodes, _session=team._session))

    for finding in run_ranks(2, work):
        assert finding.works is works and "0 -> 1, 1 -> 0" in finding.found
