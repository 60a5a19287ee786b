# SPDX-License-Identifier: MIT
"""The workspace of a group: how large its parts become, and what is kept of it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from tilescale import ops
from tilescale.errors import UsageError
from tilescale.ops.layout import ALIGNMENT, new_tensors

module = import_module("tilescale.ops.workspace")
RANKS, ROWS, K = 2, 64, 48
NARROW, BRAIN = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests to the symmetric heap."""
    sizes: list[int] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes.append(*shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(module, "heap_for", lambda team: SimpleNamespace(empty=empty))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return sizes


def made() -> ops.Workspace:
    return ops.Workspace(SimpleNamespace(size=RANKS), torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, ROWS])
def test_there_is_room_for_what_was_said(rows: int, grown: list[int]):
    whole, heads = (RANKS, rows, K), (RANKS, rows, K // 2)
    for dtype, needs in (
        (NARROW, [(torch.uint8, whole, (RANKS, rows * 4))]),  # gathered with the scales of rows
        (NARROW, [(BRAIN, whole)]),  # parts of sums
        (None, [(torch.uint8, (RANKS, rows, 2 * K))]),
        (torch.float32, [(torch.float32, whole)]),
        (BRAIN, [(BRAIN, heads, heads)]),  # keys and values
    ):
        space = made()
        space.reserve(module.needed(RANKS * rows, K, dtype or BRAIN))
        grown.clear()
        for kind, *shapes in needs:
            space.symmetric(kind, *shapes)
        assert grown == [], f"{dtype}: {needs}"
    space = made()
    space.reserve(module.needed(RANKS * rows, 4 * K, BRAIN))
    grown.clear()
    space.symmetric(BRAIN, whole, whole, (2 * RANKS, rows, K))  # with gradients of both
    assert grown == []


def test_parts_grow_by_themselves(grown: list[int], monkeypatch: pytest.MonkeyPatch):
    space = made()
    space.reserve(4096)
    assert (space.nbytes, space.own_nbytes, grown) == (4096, 0, [4096])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="needs a workspace of 8192 bytes, it has 4096"):
        space.symmetric(torch.uint8, (8192,))
    space.own(torch.uint8, (8192,))  # which does not affect other ranks
    assert (space.nbytes, space.own_nbytes, grown) == (4096, 8192, [4096])


def test_tensors_are_the_same_again_and_do_not_overlap(grown: list[int]):
    space = made()
    one, other = space.symmetric(BRAIN, (3, 5), (7,))
    assert one.shape == (3, 5) and other.shape == (7,) and other.data_ptr() - one.data_ptr() == 256
    assert space.symmetric(BRAIN, (3, 5), (7,))[0] is one
    space.reserve(1 << 12)
    for rows in range(2 * module._KEPT):
        space.symmetric(torch.uint8, (rows % 100 + 1, rows // 100 + 1))
    assert len(space._symmetric._views) == module._KEPT
    assert space.own(BRAIN, (0, 5))[0].shape == (0, 5)


def test_temporary_tensors_share_an_allocation():
    """But not those apart, which an operator may return; none overlap."""
    forms = ((3, 5), torch.bfloat16), ((7,), torch.int32), ((2, 128), torch.float8_e4m3fn), ((0, 4), torch.float32)
    made = new_tensors(torch.empty(1), *forms, apart=(1,))
    assert [(tuple(x.shape), x.dtype) for x in made] == [*forms]
    assert len({x.untyped_storage().data_ptr() for x in (made[0], made[2], made[3])}) == 1
    assert made[1].untyped_storage().nbytes() == made[1].nbytes
    assert made[2].storage_offset() % ALIGNMENT == 0 and made[2].storage_offset() >= made[0].nbytes
