# SPDX-License-Identifier: MIT
"""The choice of an algorithm follows the rounds of each over the machine's links, and has a reason."""

from dataclasses import replace

import pytest

from tilescale.collectives import TENSORS, TILES, AvailableAlgorithms, CollectiveQuery, select
from tilescale.collectives.select import everything, members, moved, numbering, seconds
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine

KIB, MIB = 1 << 10, 1 << 20
H200 = Machine.load("h200-sxm-8")
NVLINK = H200.network("device")


def wanted(operation: str, units: int = 8, nbytes: int | None = MIB, form: str = TENSORS) -> CollectiveQuery:
    return CollectiveQuery(operation, form, "device", tuple(range(units)), (), nbytes)


def chosen(operation: str, *able: str, **how: object) -> str:
    return select(H200, wanted(operation, **how), AvailableAlgorithms(able)).name


def test_all_reduce_goes_in_one_step_while_latency_counts():
    small = select(H200, wanted("allreduce", nbytes=64 * KIB), AvailableAlgorithms(("one_shot", "nccl")))
    assert small.name == "one_shot" and "nccl" in small.reason and "64 KiB" in small.reason
    assert chosen("allreduce", "one_shot", "nccl", nbytes=64 * MIB) == "nccl"
    assert chosen("allreduce", "one_shot", "nccl", nbytes=None) == "nccl"


def test_two_devices_never_send_more_in_one_step():
    assert chosen("allreduce", "one_shot", "nccl", units=2, nbytes=1 << 30) == "one_shot"


def test_impl_is_honoured_or_an_error():
    two = AvailableAlgorithms(("one_shot", "nccl"))
    assert str(select(H200, wanted("allreduce"), two, "nccl")) == "nccl (asked for)"
    with pytest.raises(UnsupportedError, match="impl='ring' of T.allreduce: available here: one_shot, nccl"):
        select(H200, wanted("allreduce"), two, "ring")


def test_what_is_kept_for_requests_is_not_taken_without():
    able = AvailableAlgorithms(("direct", "nccl"), frozenset({"direct"}))
    assert select(H200, wanted("all_gather", nbytes=KIB), able).name == "nccl"
    assert select(H200, wanted("all_gather", nbytes=KIB), able, "direct").name == "direct"


def test_without_a_choice_nothing_is_estimated():
    assert select(H200, wanted("broadcast"), AvailableAlgorithms(("nccl",))).reason == "the only one"
    assert chosen("all_gather", "nccl", "copy_engine", units=1) == "nccl"
    nowhere = replace(H200, networks=())
    assert select(nowhere, wanted("all_gather"), AvailableAlgorithms(("nccl", "direct"))).reason == "nothing to compare"


def test_every_copy_of_the_host_has_its_start_up():
    startup = NVLINK.mechanism("copy_engine").startup
    two, four = (seconds(H200, wanted("all_gather", units=n, nbytes=1), "copy_engine") for n in (2, 4))
    assert four - two == pytest.approx(2 * startup, rel=1e-3)


def test_a_library_takes_its_time_to_set_up():
    without = replace(H200, networks=tuple(replace(n, libraries=()) for n in H200.networks))
    with_setup, plain = (seconds(machine, wanted("all_gather"), "nccl") for machine in (H200, without))
    assert with_setup - plain == pytest.approx(6.6e-6)


def test_functions_combine_what_a_library_has_gathered():
    assert moved("allreduce", "nccl", 4, 100, True) == ("all_gather", 400)
    assert moved("allreduce", "one_shot", 4, 100, True) == moved("allreduce", "one_shot", 4, 100, False)


def test_everything_is_what_the_machine_has_the_parts_of():
    here = everything(H200, wanted("allreduce"))
    assert {"one_shot", "ring", "nccl"} <= {*here.names} and not here.on_request
    assert "copy_engine" in everything(H200, wanted("all_gather")).names
    assert {"nccl", "copy_engine"}.isdisjoint(everything(H200, wanted("allreduce", form=TILES)).names)
    wafer = Machine.load("wafer-mesh")
    cores = CollectiveQuery("allreduce", TILES, "core", tuple(range(1000)))
    assert {"one_shot", "two_shot"} <= everything(wafer, cores).on_request
    assert "nccl" not in everything(wafer, replace(cores, form=TENSORS)).names
    assert "halving" not in everything(H200, wanted("reduce_scatter", units=6)).names


def test_units_are_numbered_as_the_machine_does():
    extents = {"node": 2, "device": 4}
    assert members(extents, "device") == (0, 1, 2, 3) and members(extents, "node") == (0, 4)
    assert numbering(H200, extents) == (("device", 4),)
    wafer = Machine.load("wafer-mesh")
    assert numbering(wafer, {"core": 6}, (2, 3)) == (("core", (2, 3)),)
