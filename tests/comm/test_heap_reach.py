# SPDX-License-Identifier: MIT
"""A heap of which some ranks have no address: what is left for loads and stores."""

from types import SimpleNamespace

import pytest
import torch

from tilescale.comm import Team
from tilescale.comm.heap.nvshmem import address_map
from tilescale.comm.heap.reach import Reach, reach

OWN, STRIDE = 1 << 40, 1 << 20


def heap(rank: int, nodes: int, local: int) -> SimpleNamespace:
    """As NVSHMEM maps it: the peers of one node, from this one on, in a circle."""
    first = rank // local * local
    pointers = [
        OWN + (peer - rank) % local * STRIDE if first <= peer < first + local else 0 for peer in range(nodes * local)
    ]
    ranks = tuple(range(nodes * local))
    return SimpleNamespace(
        team=Team(ranks=ranks, rank=rank),
        device=torch.device("cpu"),
        addresses=address_map(OWN, pointers, rank, alone=STRIDE),
        offset=lambda tensor: 256,
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    )


@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1, 4, 5])
def test_the_ranks_of_a_node_are_a_heap_of_their_own(rank: int, local: int) -> None:
    found = reach(heap(rank, 6 // local, local))
    assert isinstance(found, Reach)
    first = rank // local * local
    assert found.team.ranks == tuple(range(first, first + local)) and found.team.ranks[found.team.rank] == rank
    for peer in range(local):
        assert found.addresses.slot(peer) == (first + peer - rank) % local
    assert found.addresses.unreachable == () and found.addresses.slot(found.team.rank) == 0
    tensor = torch.zeros(3, 4)
    everywhere = found.peers(tensor)
    assert everywhere.shape == (local, 3, 4) and everywhere.stride() == (STRIDE // 4, 4, 1)
    assert everywhere.data_ptr() == OWN + 256


def test_a_heap_that_all_ranks_reach_is_whole() -> None:
    whole = heap(1, 1, 4)
    assert reach(whole) is whole
