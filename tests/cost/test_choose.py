# SPDX-License-Identifier: MIT
"""The choice of mechanisms follows the machine's numbers, and has a reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilescale.cost.choose import TileTransfer, mechanism, transfer_time
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine, Network

KIB, MIB = 1 << 10, 1 << 20
TILE = TileTransfer("put", "shared", 32 * KIB, 128)
WHOLE = TileTransfer("put", "global", MIB, 256, whole=True, starters=("program", "host"))


@pytest.fixture
def nvlink() -> Network:
    return Machine.load("h200-sxm-8").network("device")


def test_a_lone_program_avoids_the_start_up(nvlink: Network):
    choice = mechanism(nvlink, TILE)
    assert choice.name == "lsu"
    assert "32 KiB" in choice.reason and "tma" in choice.reason
    assert "copy_engine: is started by the host" in choice.reason


def test_on_a_full_device_start_up_matters_little_and_the_first_described_is_taken(nvlink: Network):
    assert mechanism(nvlink, replace(TILE, programs=132)).name == "tma"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (replace(TILE, programs=132, scope="fragment"), "tma: moves shared memory, the tile lies in fragment memory"),
        (replace(TILE, programs=132, row_bytes=24), "tma: moves rows of multiples of 16 bytes, these are of 24"),
        (replace(TILE, programs=132, begin_bytes=40), "tma: moves rows that begin at multiples of 16 bytes, these at"),
        (replace(TILE, programs=132, nbytes=None), "tma: moves boxes of constant extents, these are known at launch"),
    ],
)
def test_bulk_copies_need_shared_memory_aligned_rows_and_extents(nvlink: Network, wanted: TileTransfer, reason: str):
    choice = mechanism(nvlink, wanted)
    assert choice.name == "lsu" and reason in choice.reason
    with pytest.raises(UnsupportedError, match="impl='tma': moves"):
        mechanism(nvlink, wanted, "tma")


def test_whole_tensors_go_by_programs_until_the_copy_engine_has_started(nvlink: Network):
    assert mechanism(nvlink, WHOLE).name == "lsu"
    assert mechanism(nvlink, replace(WHOLE, nbytes=1 << 30)).name == "lsu"  # within the tie of 395 and 369 GB/s
    faster = replace(
        nvlink, mechanisms=tuple(m.map(lambda _, r: r / 2) if m.name == "lsu" else m for m in nvlink.mechanisms)
    )
    assert mechanism(faster, WHOLE).name == "lsu"
    assert mechanism(faster, replace(WHOLE, nbytes=1 << 30)).name == "copy_engine"
    assert mechanism(faster, replace(WHOLE, nbytes=None)).name == "copy_engine"


def test_what_is_asked_for_is_taken_or_an_error(nvlink: Network):
    assert str(mechanism(nvlink, TILE, "tma")) == "tma (asked for)"
    with pytest.raises(UnsupportedError, match="started by the host"):
        mechanism(nvlink, TILE, "copy_engine")
    with pytest.raises(UnsupportedError, match="no such mechanism"):
        mechanism(nvlink, TILE, "rdma")


def test_a_machine_without_bulk_copies_uses_loads_and_stores():
    assert mechanism(Machine.load("a100-sxm-8").network("device"), replace(TILE, programs=108)).name == "lsu"


def test_nothing_may_be_able(nvlink: Network):
    host_only = replace(nvlink, mechanisms=tuple(m for m in nvlink.mechanisms if m.started_by == "host"))
    with pytest.raises(UnsupportedError, match="no mechanism of nvlink can carry this put: copy_engine: is started by"):
        mechanism(host_only, TILE)


@given(nbytes=st.integers(1, 1 << 32), programs=st.integers(1, 200), row=st.sampled_from([1, 8, 16, 64]))
def test_the_choice_is_within_the_tie_of_the_best(nbytes: int, programs: int, row: int):
    network = Machine.load("h200-sxm-8").network("device")
    wanted = TileTransfer("put", "shared", nbytes, row, programs)
    times = {m.name: transfer_time(network, m, wanted) for m in network.mechanisms if m.started_by == "program"}
    if row % 16:
        del times["tma"]
    assert times[mechanism(network, wanted).name] <= 1.1 * min(times.values())
