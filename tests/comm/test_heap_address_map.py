# SPDX-License-Identifier: MIT
"""Addresses of heaps: slots, addresses and the checks on them, for this project's order and for NVSHMEM's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilescale.comm import AddressMap
from tilescale.comm.heap.nvshmem import address_map
from tilescale.errors import NoPathError, OutOfBoundsError, PeerOutOfRangeError, UnsupportedError

MAP = AddressMap(base=0x10000, stride=0x1000, size=0x800, rank=1, slots=(0, 1, 2))


def test_addresses() -> None:
    assert [MAP.slot(peer) for peer in range(3)] == [0, 1, 2] and MAP.ranks == 3 and MAP.shift == 0
    assert MAP.address(2, 16) == 0x12010 and replace(MAP, base=0).address(1) == 0x1000
    assert MAP.offset(0x11010) == 16
    assert MAP.owns(0x11000, 0x800) and not MAP.owns(0x11000, 0x801) and not MAP.owns(0x10FFF) and MAP.owns(0x11800, 0)


def test_what_lies_outside() -> None:
    for peer in (-1, 3):
        with pytest.raises(PeerOutOfRangeError):
            MAP.slot(peer)
    for offset in (-1, 0x800):
        with pytest.raises(OutOfBoundsError):
            MAP.address(0, offset)
    with pytest.raises(OutOfBoundsError, match="rank 1's heap"):
        MAP.offset(0x12000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": 0x1001},
        {"base": -1},
        {"rank": 3},
        {"slots": (0, 1, 1)},
        {"slots": (0, 1, 3)},
        {"slots": (0, None, 2)},
    ],
)
def test_invariants(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no address map"):
        replace(MAP, **wrong)


@pytest.mark.parametrize("rank", range(4))
def test_nvshmem_order(rank: int) -> None:
    own, stride = 0x70000200, 0x100000
    pointers = [own + (peer - rank) % 4 * stride for peer in range(4)]
    view = address_map(own, pointers, rank, alone=0x200)
    assert [view.address(peer, 0x10) for peer in range(4)] == [pointer + 0x10 for pointer in pointers]
    assert all((peer + view.shift) % 4 == view.slot(peer) for peer in range(4)) and view.slot(rank) == 0
    assert view.stride == stride and view.unreachable == ()


def test_nvshmem_peers_without_an_address() -> None:
    view = address_map(0x4000, [0x4000, 0x5000, 0, 0], 0, alone=0x200)
    assert view.unreachable == (2, 3) and view.reachable == (0, 1) and view.slot(1) == 1 and view.shift == 0
    with pytest.raises(NoPathError, match="rank 2"):
        view.address(2)
    assert address_map(0x4000, [0, 0x4000], 1, alone=0x200).stride == 0x200


@pytest.mark.parametrize(
    "pointers",
    [
        [0x4000, 0x5000, 0x7000],  # no common stride
        [0x4000, 0x6000, 0x5000],  # another order
        [0x4000, 0x3000, 0x2000],  # downwards
        [0x4001, 0x5000, 0x6000],  # not even this rank is where it is
    ],
)
def test_nvshmem_elsewhere_is_refused(pointers: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="not one stride apart"):
        address_map(0x4000, pointers, 0, alone=0x200)
