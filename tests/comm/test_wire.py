# SPDX-License-Identifier: MIT
"""Objects survive the wire, and the data of tensors and arrays is not copied into the pickle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilescale.comm.wire import decode, encode


def _send(obj):
    return decode([bytearray(part) for part in encode(obj)])


_LEAVES = st.none() | st.integers() | st.text() | st.binary()
_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8]


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_plain_objects(obj) -> None:
    assert _send(obj) == obj


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (256, 513)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = _send({"x": tensor})["x"]
    assert copy.dtype == dtype and copy.shape == tensor.shape
    assert torch.equal(copy.float(), tensor.float()) if dtype != torch.complex64 else torch.equal(copy, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(600 * 400.0).reshape(600, 400).T,
        torch.arange(600 * 400.0).reshape(600, 400)[::2, 1::3],
        torch.ones(3).expand(70000, 3),
        torch.ones(4, requires_grad=True),
        torch.complex(torch.ones(5), torch.ones(5)).conj(),
    ],
    ids=["transposed", "strided", "expanded", "leaf", "conjugated"],
)
def test_views_arrive_contiguous_and_detached(tensor: torch.Tensor) -> None:
    copy = _send(tensor)
    assert copy.is_contiguous() and not copy.requires_grad
    assert torch.equal(copy, tensor.detach().resolve_conj())


def test_views_of_one_memory_stay_views_of_one() -> None:
    whole = torch.arange(100_000, dtype=torch.int32)
    views = [whole[10:20], whole.view(torch.float32)[15], whole[:30].view(2, 15).T, whole[50_000:60_000]]
    sent = _send(("x", {"views": views, "again": views[0], "lazy": torch.ones(2, dtype=torch.complex64).conj()}))
    copies, again = sent[1]["views"], sent[1]["again"]
    assert all(torch.equal(copy, view) for copy, view in zip(copies, views, strict=True)) and again is copies[0]
    copies[2][:] = torch.arange(30, dtype=torch.int32).view(15, 2)
    assert copies[0].tolist() == [20, 22, 24, 26, 28, 1, 3, 5, 7, 9] and copies[1].view(torch.int32) == 1
    assert whole[10] == 10


def test_of_a_large_memory_only_what_is_viewed_travels() -> None:
    whole = torch.zeros(1 << 22)
    apart = encode([whole[:10], whole[-10:]])
    together = encode([whole[100:110], whole[90:105], whole[-10:]])
    assert sum(part.nbytes for part in apart) < 4096 > sum(part.nbytes for part in together)


def test_what_arrives_is_writable() -> None:
    small, large, array = _send((torch.zeros(3), torch.zeros(100_000), np.zeros(100_000)))
    small += 1
    large += 1
    array += 1
    assert small.sum() == 3 and large.sum() == 100_000 == array.sum()


def test_large_data_is_neither_copied_nor_pickled() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    head, data = encode([tensor, "small"])
    assert head.nbytes < 2048
    tensor[0] = 7
    assert data[0] == 7


def test_parameters_and_other_subclasses_stay_themselves() -> None:
    assert isinstance(_send(torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter)
