# SPDX-License-Identifier: MIT
"""Every kernel of the collection, written for one GPU in plain TileLang, against its float64 reference."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels.registry import KERNELS, PlainKernel

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_result_is_that_of_the_reference(kernel: PlainKernel) -> None:
    args = kernel.inputs(torch.Generator().manual_seed(0))
    expected = kernel.reference(args)
    tilescale.emulate(kernel.program(T), args)
    for index, reference in expected.items():
        found = args[index].to(reference.dtype)
        torch.testing.assert_close(found, reference, rtol=kernel.rtol, atol=kernel.atol)
