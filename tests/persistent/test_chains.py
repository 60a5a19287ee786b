# SPDX-License-Identifier: MIT
"""Random chains of phases: one launch leaves the bits that launches in order leave, without races and deadlocks.

`RANDOM_PROGRAMS=100` draws more of them.
"""

import os
from itertools import product
from typing import Any

import pytest

import tilescale
from tests.persistent.chains import Chain, arguments
from tilescale.hda import Machine
from tilescale.passes.persistent.rewrite import persistent

CHAINS = int(os.environ.get("RANDOM_PROGRAMS", "4"))


def drawn(looped: bool, devices: int, seed: int) -> Any:
    """A chain; one of two is drawn at night only."""
    marks = [pytest.mark.nightly] * ((looped + devices + seed) % 2)
    name = f"{'looped' if looped else 'straight'}-{devices}-{seed}"
    return pytest.param(looped, devices, seed, marks=marks, id=name)


@pytest.mark.parametrize(
    ("looped", "devices", "seed"), [drawn(*given) for given in product((False, True), (1, 2), range(CHAINS))]
)
def test_one_launch_leaves_the_same_bits(looped: bool, devices: int, seed: int, small: Machine):
    with tilescale.use_machine(small):
        chain = Chain(seed, devices, looped=looped).program()
        func = chain.trace()
    want = arguments(chain)
    tilescale.emulate(func, want, machine=small, time=False, check="none")
    fused, _ = persistent(func, small)
    for order in (None, 1):
        got = arguments(chain)
        check = "none" if order else "all"
        tilescale.emulate(fused, got, machine=small, time=False, schedule_seed=order, check=check)
        for mine, expected in zip(got, want, strict=True):
            assert all(a.equal(b) for a, b in zip(mine, expected, strict=True))
