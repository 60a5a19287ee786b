# SPDX-License-Identifier: MIT
"""Kernels of captured graphs whose parameters are one buffer."""

import ctypes

import pytest
from cuda.bindings import driver as names

from tilescale.backends.cuda.running import driver, graph_nodes


@pytest.mark.parametrize("size_first", [False, True])
def test_a_node_has_a_copy_of_packed_parameters_for_updates(size_first: bool, monkeypatch: pytest.MonkeyPatch):
    given, size = ctypes.create_string_buffer(b"addresses", 24), ctypes.c_size_t(24)
    buffer, length = (1, ctypes.addressof(given)), (2, ctypes.addressof(size))
    words = (*length, *buffer, 0) if size_first else (*buffer, *length, 0)
    extra = (ctypes.c_uint64 * 5)(*words)

    def asked(name: str, handle: int) -> names.CUDA_KERNEL_NODE_PARAMS:
        found = names.CUDA_KERNEL_NODE_PARAMS()
        found.extra, found.gridDimX = ctypes.addressof(extra), 3
        return found

    monkeypatch.setattr(driver, "call", asked)
    node = graph_nodes._kernel(7)
    assert node.handle == 7 and node.same[:3] == ("KERNEL", 0, 3)
    (block,) = node.blocks
    assert bytes(block) == bytes(given) and ctypes.addressof(block) != ctypes.addressof(given)
    passed = dict(zip(*[iter((ctypes.c_uint64 * 4).from_address(int(node.kept[0].extra)))] * 2, strict=True))
    assert passed[1] == ctypes.addressof(block) and ctypes.c_size_t.from_address(passed[2]).value == 24
