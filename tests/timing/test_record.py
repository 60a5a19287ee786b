# SPDX-License-Identifier: MIT
"""Time of a software-pipelined loop on an idle machine: concurrent loads, alternating buffers."""

import pytest

from tilescale.timing.record import WorkPart, WorkStep, alone, pipelined, together


def load(latency: float, seconds: float) -> WorkStep:
    return WorkStep([WorkPart("load", "transfer", None, {"memory": seconds})], latency)


def product(seconds: float) -> WorkStep:
    return WorkStep([WorkPart("product", "compute", None, {"tensor": seconds})], 0.0)


TIMES = 11


@pytest.mark.parametrize("stages", [2, 4])
def test_loads_of_an_iteration_are_on_their_way_at_once(stages: int):
    round_ = 8.0 + 1.0  # the latency once, then the GEMM
    first, rest = pipelined([load(8.0, 1.0), load(8.0, 1.0), product(1.0)], TIMES, stages)
    assert alone(first) == 8 and alone(rest) == pytest.approx(max((TIMES - 1) * round_ / stages, (TIMES - 1) * 2))
    inside = together([load(8.0, 1.0), load(8.0, 1.0), product(1.0)], TIMES, stages)
    assert alone(inside) == pytest.approx(max(round_ + (TIMES - 1) * round_ / stages, TIMES * 2))


def test_loads_share_what_they_demand():
    first, rest = pipelined([load(1.0, 3.0), load(1.0, 3.0), product(1.0)], TIMES, 2)
    assert alone(first) == 6 and alone(rest) == (TIMES - 1) * 6


def test_loops_without_stages_take_turns():
    inside = together([load(8.0, 1.0), load(8.0, 1.0), product(1.0)], TIMES, 1)
    assert alone(inside) == pytest.approx(TIMES * 17)
