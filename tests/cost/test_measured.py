# SPDX-License-Identifier: MIT
"""Measurements are read as written, errors in them are reported, and machines and choices follow them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import CALIBRATION, keep
from tilescale.collectives import TENSORS, AvailableAlgorithms, CollectiveQuery, select
from tilescale.cost.calibrated import calibrated, fit, in_force, measured, origin
from tilescale.cost.measured import DATA, Measured, MeasuredCollective, MeasuredTransfer
from tilescale.errors import UsageError
from tilescale.hda import Machine

KIB, MIB = 1 << 10, 1 << 20
H200 = Machine.load("h200-sxm-8")
SHIPPED = sorted(DATA.glob("*.json"))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_of_machines_and_say_where_their_points_come_from(path: Path):
    data = Measured.load(path)
    assert data.machine == path.stem and data.machine in Machine.names() and not data.simulated
    assert data.gpu and data.versions and data.date[:4].isdigit()
    points = (*data.wires, *data.flags, *data.launches, *data.products, *data.collectives, *data.contention)
    assert points and data.source and all(point.source or "calibrate" in data.source for point in points)
    assert any(product in data.gpu for product in Machine.load(data.machine).identify.products)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_machine_takes_the_shipped_numbers_of_its_own_name(path: Path, environment, tmp_path: Path):
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    machine, data = Machine.load(path.stem), Measured.load(path)
    assert measured(machine) == data and in_force(machine) == machine
    network, mine = calibrated(machine).network("device"), machine.network("device")
    assert network.latency == pytest.approx(mine.latency, rel=0.1)
    for mechanism in {wire.mechanism for wire in data.wires}:
        assert network.mechanism(mechanism).put == pytest.approx(mine.mechanism(mechanism).put, rel=0.1)


def test_what_is_written_is_read(tmp_path: Path):
    (tmp_path / "data.json").write_text(CALIBRATION.text)
    assert Measured.load(tmp_path / "data.json") == CALIBRATION
    assert CALIBRATION.text.count("\n  {") == 9, "a line for each point"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": 7}, "it is not of format 1"),
        ({"speed": 3}, "the file has speed, which is unknown"),
        ({"date": None}, "the file has no date"),
        ({"flags": [{"nbytes": 0}]}, r"flags\[0\] has no us"),
        ({"flags": [{"nbytes": 0, "us": 1.0}, {"nbytes": 0, "us": -1.0}]}, r"flags\[1\] has no value above 0"),
        ({"wires": ["fast"]}, r"wires\[0\] is not an object"),
        ({"wires": 3}, "wires is not a list"),
        ({"flags": [{"nbytes": 0, "us": "NaN"}]}, r"flags\[0\] has a us that is not a valid float: 'NaN'"),
        ({"flags": [{"nbytes": 0, "us": math.nan}]}, "a us that is not a valid float: nan"),
        ({"flags": [{"nbytes": 0, "us": 10**400}]}, "a us that is not a valid float: 1000"),
        ({"flags": [{"nbytes": [0], "us": 1.0}]}, "a nbytes that is not a valid int: "),
        ({"launches": [{"mode": {"a": 1}, "us": 1.0}]}, "a mode that is not a valid str: {'a': 1}"),
        ({"launches": [{"mode": "graph", "us": 1.0, "spread": [1.0]}]}, "a spread that is not a valid tuple"),
        ({"products": [{"shape": [0, 1, 1], "dtype": "int8", "by": "", "us": 1.0}]}, "no value above 0"),
        ({"units": None, "versions": "0.1"}, "the file has no units"),
        ({"versions": "0.1"}, "the file has a versions that is not a valid Mapping"),
    ],
)
def test_a_file_of_another_form_says_what_is_wrong(tmp_path: Path, change: dict, fault: str):
    text = {key: value for key, value in {**json.loads(CALIBRATION.text), **change}.items() if value is not None}
    (tmp_path / "data.json").write_text(json.dumps(text))
    with pytest.raises(UsageError, match=fault) as caught:
        Measured.load(tmp_path / "data.json")
    assert str(tmp_path / "data.json") in str(caught.value) and "tilescale calibrate" in str(caught.value)


def test_half_a_file_is_no_measurement(tmp_path: Path):
    (tmp_path / "data.json").write_text(CALIBRATION.text[:-20])
    with pytest.raises(UsageError, match="holds no measurements"):
        Measured.load(tmp_path / "data.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"date": ' * 100_000, "[1, 2]", "null"])
def test_a_file_of_something_else_is_no_measurement(tmp_path: Path, text: str):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(UsageError, match="holds no measurements"):
        Measured.load(tmp_path / "data.json")


def test_a_link_to_a_device_is_not_read(tmp_path: Path):
    (tmp_path / "data.json").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="it is not a file"):
        Measured.load(tmp_path / "data.json")


# -- machines ----------------------------------------------------------------------------------------------------------


@given(startup=st.floats(1e-7, 1e-4), rate=st.floats(1e9, 1e12))
def test_a_fit_finds_what_the_wires_follow(startup: float, rate: float):
    sizes = [1 << n for n in range(10, 31, 2)]
    points = [(n, n / (startup + n / rate)) for n in sizes]
    wires = [MeasuredTransfer(mechanism="dma", operation="put", nbytes=n, gb_s=each / 1e9) for n, each in points]
    assert fit(wires) == (pytest.approx(startup, rel=1e-3), pytest.approx(rate, rel=1e-3))


def test_one_size_says_nothing_of_the_start_up():
    assert fit([MeasuredTransfer(mechanism="dma", operation="put", nbytes=MIB, gb_s=100)] * 3) == (None, 100e9)
    assert fit([MeasuredTransfer(mechanism="dma", operation="put", gb_s=100)]) == (None, 100e9)


def test_the_built_in_description_has_the_shipped_numbers():
    """Within what rounding and the choice of points leave."""
    machine = calibrated(H200)
    ours, theirs = (m.network("device") for m in (H200, machine))
    assert theirs.latency == pytest.approx(ours.latency, rel=0.05)
    for mechanism in ours.mechanisms:
        found = theirs.mechanism(mechanism.name)
        assert found.put == pytest.approx(mechanism.put, rel=0.03)
        assert found.startup == pytest.approx(mechanism.startup, rel=0.05, abs=1e-9)
    assert machine.tensor_level.launch == H200.tensor_level.launch
    rates = (m.rate("device", "tensor", "bfloat16", sustained=True) for m in (H200, machine))
    assert next(rates) == pytest.approx(next(rates), rel=0.05)
    assert machine.network("device", "node").name == "nvlink" and machine.networks[-1] == H200.networks[-1]


def test_what_nobody_measured_stays_as_described():
    nothing = replace(CALIBRATION, wires=(), flags=(), launches=(), products=())
    assert calibrated(H200, nothing) == H200


def test_measurements_are_of_one_machine():
    with pytest.raises(UsageError, match="measurements of h200-sxm-8, not of wafer-mesh"):
        calibrated("wafer-mesh", CALIBRATION)
    with pytest.raises(UsageError, match="there are no measurements of wafer-mesh here"):
        calibrated("wafer-mesh")


def test_the_newest_calibration_is_in_force(environment, tmp_path: Path):
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    assert measured(H200).source != CALIBRATION.source and in_force(H200) == H200
    assert origin(H200) == "what is shipped"
    keep(tmp_path, replace(CALIBRATION, date="2027-01-01T00:00:00+00:00"))
    keep(tmp_path, replace(CALIBRATION, date="2026-01-01T00:00:00+00:00"))
    keep(tmp_path, replace(CALIBRATION, date="2028-01-01T00:00:00+00:00", simulated=True))
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    assert measured(H200).date.startswith("2027") and origin(H200).startswith("the calibration of 2027-01-01")
    assert in_force(H200).network("device").mechanism("copy_engine").put == pytest.approx(200e9)
    assert in_force(H200).digest != H200.digest


def test_what_was_not_measured_anew_is_what_is_shipped(environment, tmp_path: Path):
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    shipped = measured(H200)
    mine = MeasuredCollective(operation="allreduce", algorithm="one_shot", units=2, nbytes=KIB, us=7.0)
    keep(tmp_path, replace(CALIBRATION, wires=(), flags=(), products=(), contention=(), collectives=(mine,)))
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    found = measured(H200)
    assert found.wires == tuple(replace(w, source=w.source or shipped.source) for w in shipped.wires)
    assert [launch.us for launch in found.launches if launch.mode == "graph"] == [1.5]
    assert {launch.mode for launch in found.launches} == {launch.mode for launch in shipped.launches}
    gathers = ("all_gather", "direct", 2, MIB)
    assert found.collective_s(*gathers) == shipped.collective_s(*gathers) is not None
    # Times of one choice are from one measurement.
    assert [p for p in found.collectives if (p.operation, p.units) == ("allreduce", 2)] == [mine]
    assert in_force(H200).network("device") == H200.network("device")


def test_an_empty_calibration_hides_nothing(environment, tmp_path: Path):
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    shipped = measured(H200)
    nothing = dict.fromkeys(("wires", "flags", "launches", "products", "collectives", "contention"), ())
    keep(tmp_path, replace(CALIBRATION, **nothing))
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    assert measured(H200) == shipped and origin(H200) == "what is shipped"


# -- choices -----------------------------------------------------------------------------------------------------------


def curve(algorithm: str, *points: tuple[int, float]) -> list[MeasuredCollective]:
    return [
        MeasuredCollective(operation="allreduce", algorithm=algorithm, units=2, nbytes=n, us=us) for n, us in points
    ]


def test_between_two_sizes_times_are_a_start_and_a_rate():
    data = replace(CALIBRATION, collectives=tuple(curve("ring", (KIB, 2.0), (16 * KIB, 8.0), (64 * KIB, 10.0))))
    found = [data.collective_s("allreduce", "ring", 2, n) for n in (KIB, 4 * KIB, 16 * KIB, 64 * KIB)]
    assert found == pytest.approx([2e-6, 3.2e-6, 8e-6, 10e-6])
    for other in (("ring", 2, KIB - 1), ("ring", 2, 65 * KIB), ("ring", 4, KIB), ("direct", 2, KIB)):
        assert data.collective_s("allreduce", *other) is None


def test_unaligned_parts_are_a_curve_of_their_own():
    """Two parts are aligned in multiples of 32 bytes; sums in place have no parts."""
    points = curve("direct", (KIB, 2.0), (17 * KIB, 10.0), (KIB + 4, 4.0), (17 * KIB + 4, 36.0))
    data = replace(CALIBRATION, collectives=tuple(replace(point, operation="all_gather") for point in points))
    found = [data.collective_s("all_gather", "direct", 2, 9 * KIB + more) for more in (0, 4, 16, 32)]
    assert found == pytest.approx([6e-6, 20e-6, 20e-6 + 12 * 2e-9, 6e-6 + 32 * 0.5e-9 / 1.024], rel=1e-2)
    whole = replace(CALIBRATION, collectives=tuple(curve("ring", (KIB, 2.0), (17 * KIB, 10.0))))
    assert whole.collective_s("allreduce", "ring", 2, 9 * KIB + 4) == pytest.approx(6e-6, rel=1e-2)
    aligned = replace(CALIBRATION, collectives=data.collectives[:2])
    assert aligned.collective_s("all_gather", "direct", 2, 9 * KIB + 4) == pytest.approx(6e-6, rel=1e-2), "no other"


def test_types_are_curves_of_their_own():
    narrow = curve("ring", (KIB, 2.0), (16 * KIB, 8.0))
    wide = [replace(point, us=3 * point.us, dtype="float32") for point in narrow]
    data = replace(CALIBRATION, collectives=(*narrow, *wide))
    times = [data.collective_s("allreduce", "ring", 2, 4 * KIB, dtype) for dtype in ("bfloat16", "float32", "int32")]
    assert times == pytest.approx([3.2e-6, 9.6e-6, 3.2e-6])


def test_the_choice_follows_what_was_measured(environment, tmp_path: Path):
    able = AvailableAlgorithms(("one_shot", "two_shot"))
    wanted = CollectiveQuery("allreduce", TENSORS, "device", (0, 1), (), 8 * KIB)
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    assert select(H200, wanted, able).name == "one_shot"
    both = curve("one_shot", (KIB, 9.0), (MIB, 90.0)) + curve("two_shot", (KIB, 4.0), (MIB, 200.0))
    keep(tmp_path, replace(CALIBRATION, collectives=tuple(both)))
    environment(TILESCALE_CACHE_DIR=str(tmp_path))
    small, large = select(H200, wanted, able), select(H200, replace(wanted, nbytes=MIB), able)
    assert small.name == "two_shot" and small.reason.startswith("measured") and "one_shot" in small.reason
    assert large.name == "one_shot"
    # Without a measurement of one of them, and for other numbers of units, all are estimated.
    for other in (replace(wanted, nbytes=2 * MIB), replace(wanted, units=(0, 1, 2)), replace(wanted, nbytes=None)):
        assert select(H200, other, able).reason.startswith("estimated")
    assert "measured" not in select(H200, wanted, AvailableAlgorithms(("one_shot", "two_shot", "nccl"))).reason
