# SPDX-License-Identifier: MIT
"""A calibration has the results of a machine's simulation, is stored atomically, and applies only if it was measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilescale.cli import main
from tilescale.cost.calibrated import calibrated, in_force, measured
from tilescale.cost.measured import IN_PARTS, KINDS, Measured, has_aligned_parts
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.tuning import probes
from tilescale.tuning.calibrate import calibrate, check, keep
from tilescale.tuning.places import here
from tilescale.tuning.probes import groups
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import Runner

H200 = Machine.load("h200-sxm-8")


@pytest.fixture(scope="module")
def quick() -> Measured:
    """A calibration of two units, in simulated time."""
    return calibrate(here(H200, 2), ProgressSteps(), quick=True)


def test_simulated_points_are_those_of_the_machine(quick: Measured):
    assert quick.simulated and quick.gpu == "" and quick.units == 2 and quick.machine == H200.name
    nvlink = H200.network("device")
    assert {wire.mechanism for wire in quick.wires} == {"tma", "lsu", "copy_engine"}
    assert max(w.gb_s for w in quick.wires if w.nbytes == 256 << 20) == pytest.approx(395, rel=0.03)
    assert all(w.gb_s == pytest.approx(45.7, rel=0.01) for w in quick.wires if w.programs == 1)
    assert [flag.us for flag in quick.flags] == [pytest.approx(nvlink.latency * 1e6, rel=0.05)]
    assert {launch.mode: launch.us for launch in quick.launches}["graph"] == pytest.approx(0.9, rel=0.05)
    assert {made.algorithm for made in quick.collectives} > {"one_shot", "two_shot", "nccl"}
    assert len({made.nbytes for made in quick.collectives}) == 2 and {made.units for made in quick.collectives} == {2}


def test_a_machine_calibrated_by_its_own_simulation_is_itself(quick: Measured):
    again = calibrated(H200, quick).network("device")
    for mechanism in H200.network("device").mechanisms:
        found = again.mechanism(mechanism.name)
        assert found.put == pytest.approx(mechanism.put, rel=0.03)
        assert found.startup == pytest.approx(mechanism.startup, rel=0.15)


def test_simulated_times_are_kept_and_never_in_force(quick: Measured, cache: Path):
    path = keep(quick)
    assert path.parent == cache / "calibrations" and Measured.load(path) == quick
    assert in_force(H200) == H200 and measured(H200).gpu == "NVIDIA H200"
    keep(replace(quick, simulated=False, gpu="NVIDIA H200"))
    assert measured(H200).units == 2 and in_force(H200) != H200


def test_everything_is_measured_in_groups_that_take_turns():
    every = list(groups(here(H200, 4), False))
    assert {group.kind for group in every} == {*("launches", "flags", "collectives", "products", "wires", "contention")}
    titles = [group.title for group in every if group.kind == "collectives"]
    assert titles == [f"{operation}, {nbytes:,} B" for operation, nbytes in probes.tensors(4)]
    assert {p.name for group in every if group.kind == "wires" for p in group.probes} >= {
        "copy_engine put 65536 by None", "lsu put 8388608 by 1", "lsu get 17301504 by None",
    }  # fmt: skip
    assert {group.kind for group in groups(here(H200, 1), False)} == {"launches", "products"}


@pytest.mark.parametrize("units", [2, 8])
def test_unaligned_parts_are_measured_too(units: int):
    every = probes.tensors(units)
    unaligned = [(name, nbytes) for name, nbytes in every if not has_aligned_parts(name, units, nbytes)]
    assert {name for name, _ in unaligned} == set(IN_PARTS) and len(unaligned) == len(IN_PARTS) * len(probes.WHOLE)
    assert all(nbytes % (2 * units) == 0 for _, nbytes in every), "whole elements of bfloat16"
    assert max(every.index(of) for of in every if of not in unaligned) < min(map(every.index, unaligned))


def test_on_devices_those_are_measured_that_a_program_is_given():
    place = replace(here(H200, 2), simulated=False)
    sums = next(group for group in groups(place, True) if group.kind == "collectives")
    assert [probe.name for probe in sums.probes] == ["one_shot", "two_shot", "nccl"]


def test_after_the_limit_nothing_new_is_begun():
    found = calibrate(here(H200, 2), ProgressSteps(), quick=True, limit_s=-1.0)
    assert not any(getattr(found, kind) for kind in KINDS)


def test_nothing_is_no_calibration(quick: Measured, cache: Path):
    with pytest.raises(UsageError, match="nothing was measured within the limit"):
        keep(replace(quick, **dict.fromkeys(KINDS, ())))
    assert not list(cache.rglob("*.json"))


def test_who_cannot_make_an_operation_is_not_tried_at_its_other_sizes(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def refuse() -> Runner:
        tried.append("refused")
        raise UsageError("there is no such algorithm")

    able = probes.Probe("able", lambda: Runner(lambda: 3.0), lambda us, spread: us)
    both = (able, probes.Probe("refused", refuse, lambda us, spread: us))
    made = [
        probes.ProbeGroup("launches", f"{n} bytes", "graph", 1, both, of=of) for n in (1, 2) for of in ("sum", "gather")
    ]
    monkeypatch.setattr("tilescale.tuning.calibrate.groups", lambda place, quick: iter(made))
    assert calibrate(here(H200, 2), ProgressSteps()).launches == (3.0,) * 4 and len(tried) == 2


def test_other_gpus_than_the_machines_are_an_error(monkeypatch: pytest.MonkeyPatch):
    place = here(H200, 2)
    monkeypatch.setattr(type(place), "name", "NVIDIA H100 80GB HBM3")
    with pytest.raises(UsageError, match="the GPUs here are NVIDIA H100.*\n.*--machine h100-sxm-8"):
        check(replace(place, simulated=False))
    with pytest.raises(UsageError, match="programs of wafer-mesh own their tensors"):
        check(here(Machine.load("wafer-mesh")))


def test_the_command_shows_what_it_has_kept(quick: Measured, cache: Path, monkeypatch: pytest.MonkeyPatch):
    known = quick
    monkeypatch.setattr("tilescale.tuning.calibrate.calibrate", lambda place, steps, **how: known)
    done = CliRunner().invoke(main, ["calibrate", "--units", "2", "--quick", "--machine", "h200-sxm-8"])
    assert done.exit_code == 0, done.output
    assert "h200-sxm-8, 2 units, simulated" in done.output and "allreduce one_shot" in done.output
    (path,) = (cache / "calibrations").iterdir()
    assert str(path) in done.output.replace("\n", "")
    done = CliRunner().invoke(main, ["calibrate", "--out", str(cache / "own.json")])
    assert done.exit_code == 0 and Measured.load(cache / "own.json") == quick
    assert "tilescale calibrate --units 2 --quick" in CliRunner().invoke(main, ["calibrate", "--help"]).output
