# SPDX-License-Identifier: MIT
"""Numbers of units: row-major, and the ranks and siblings that follow from them."""

import numpy as np
import pytest

from tilescale.program.mesh import Mesh

SIZES = (("rack", 2), ("node", 3), ("device", 4))
MESH = Mesh(SIZES)
NUMBERS = np.arange(24).reshape(2, 3, 4)


def test_numbers_are_row_major():
    for at, number in np.ndenumerate(NUMBERS):
        ranks = dict(zip(("rack", "node", "device"), at, strict=True))
        assert MESH.ranks(int(number)) == ranks and MESH.number(lambda level: ranks[level]) == number  # noqa: B023
    assert MESH.size == 24


@pytest.mark.parametrize(("axis", "level"), [*enumerate(("rack", "node", "device"))])
def test_siblings_of_a_level_are_the_others_along_its_axis(axis: int, level: str):
    lines = np.moveaxis(NUMBERS, axis, -1).reshape(-1, MESH.count(level)).tolist()
    assert sorted(map(list, MESH.groups(level))) == sorted(lines)
    for line in lines:
        for number in line:
            assert [MESH.sibling(number, level, rank) for rank in range(len(line))] == line
            assert MESH.sibling(number, level, len(line)) == line[0] and MESH.sibling(number, level, -1) == line[-1]
        assert all(b - a == MESH.step(level) for a, b in zip(line, line[1:], strict=False))
