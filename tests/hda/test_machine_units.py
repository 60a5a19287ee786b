# SPDX-License-Identifier: MIT
"""Quantities: what is accepted, what is not, and that text and number agree both ways."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilescale.hda import units


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("228 KiB", "size", 228 * 1024),
        ("1.5MiB", "size", 3 * 2**19),
        ("80 GB", "size", 80 * 10**9),
        ("1020 B", "size", 1020),
        ("900 GB/s", "bandwidth", 900e9),
        ("400 Gb/s", "bandwidth", 50e9),
        ("400 Gbit/s", "bandwidth", 50e9),
        ("4.8 TB/s", "bandwidth", 4.8e12),
        ("128 B/clock", "bandwidth", 128 * 2e9),
        ("1.2 us", "time", 1.2e-6),
        ("3 ns", "time", 3e-9),
        ("30 clock", "time", 15e-9),
        ("1 cycle", "time", 0.5e-9),
        ("1.98 GHz", "clock", 1.98e9),
        ("1410 MHz", "clock", 1.41e9),
        ("989.4 TFLOP/s", "rate", 989.4e12),
        ("1979 TOPS", "rate", 1979e12),
        ("4096 op/clock", "rate", 8.192e12),
    ],
)
def test_parse(text, kind, value):
    assert units.parse(text, kind, clock=2e9) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("228", "size"),
        (228, "size"),
        (None, "size"),
        ("-1 KiB", "size"),
        ("228 KiB/s", "size"),
        ("1.0001 B", "size"),
        ("228 kib", "size"),
        ("900 GB", "bandwidth"),
        ("900 GB/h", "bandwidth"),
        ("1.2 ks", "time"),
        ("1 GHz/s", "clock"),
        ("5 B/s", "rate"),
        ("", "rate"),
        ("0 GB/s", "bandwidth"),
        ("0 GHz", "clock"),
        ("0 op/s", "rate"),
        ("1e400 GB/s", "bandwidth"),
        ("1e999999999 s", "time"),
        (f"1{'0' * 310} GB/s", "bandwidth"),
    ],
)
def test_rejects(text, kind):
    with pytest.raises(ValueError, match=kind):
        units.parse(text, kind)


def test_quantity_per_clock_needs_a_clock():
    with pytest.raises(ValueError, match="clock"):
        units.parse("128 B/clock", "bandwidth")


@given(st.integers(1, 2**45))
def test_bytes_round_trip_exactly_in_bytes_and_closely_in_prefixes(size):
    assert units.parse(f"{size} B", "size") == size
    number, unit = units.format_bytes(size).split()
    assert units.parse(f"1 {unit}", "size") * float(number) == pytest.approx(size, rel=1e-3)


@given(st.floats(1e-11, 1e3), st.floats(1.0, 1e17))
def test_formatted_quantities_parse_back(small, large):
    assert units.parse(units.format_time(small), "time") == pytest.approx(small, rel=1e-3)
    assert units.parse(units.format_bandwidth(large), "bandwidth") == pytest.approx(large, rel=1e-3)
    assert units.parse(units.format_rate(large), "rate") == pytest.approx(large, rel=1e-3)


def test_format_reads_as_a_person_writes():
    assert units.format_bytes(228 * 1024) == "228 KiB"
    assert units.format_bytes(0) == "0 B"
    assert units.format_bandwidth(450e9) == "450 GB/s"
    assert units.format_bandwidth(999.99e9) == "1 TB/s"
    assert units.format_bandwidth(math.inf) == "unlimited B/s"
    assert units.format_time(1.2e-6) == "1.2 us"
    assert units.format_time(0) == "0 s"
    assert units.format_rate(989.43e12) == "989.4 TOP/s"
