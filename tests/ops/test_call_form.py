# SPDX-License-Identifier: MIT
"""Forms of calls: which arguments differ in them, and which tensors are found."""

import pytest
import torch

from tilescale.ops.call_form import call_form


def test_tensors_are_found_in_order_also_in_lists():
    x, y, z = (torch.ones(2) for _ in range(3))
    parameter = torch.nn.Parameter(z)
    found: list[torch.Tensor] = []
    form = call_form([x, "sum", [y, None, (parameter,)], 2], found)
    assert [id(each) for each in found] == [id(each) for each in (x, y, parameter)]
    assert form == call_form([y, "sum", [x, None, (z,)], 2], []), "whichever tensors"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        ("1", 1),
        ([1, 2], (1, 2)),
        ([1], [2]),
        (None, 0),
        ("", None),
        (torch.ones(1), None),
    ],
)
def test_other_arguments_are_another_form(one: object, other: object):
    assert call_form([one], []) != call_form([other], [])


class _Other(torch.Tensor):
    pass


@pytest.mark.parametrize("x", [torch.ones(1, device="meta"), torch.ones(1).as_subclass(_Other)])
def test_tensors_without_data_and_of_other_classes_have_no_form(x: torch.Tensor):
    assert call_form([x], []) is None
    assert call_form([torch.ones(1), [torch.ones(1), x]], []) is None
