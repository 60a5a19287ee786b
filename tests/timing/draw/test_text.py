# SPDX-License-Identifier: MIT
"""A timeline in words."""

from tests.timing.draw.timelines import US, grid, ring
from tilescale.timing.draw import summary
from tilescale.timing.timeline import Timeline, Use


def test_a_timeline_in_words():
    assert summary(ring(4, 2)) == (
        "simulated time  10 us\n"
        "at least        6 us (60%), by nvlink of device 0\n"
        "busy\n"
        "  nvlink ############........  60.0%\n"
        "  vector ####................  20.0%\n"
        "critical path   9 steps over 3 units\n"
        "        5 us  50.0%  transfer   copy x2    program.py:7\n"
        "        2 us  20.0%  sync       signal x2  program.py:7\n"
        "        2 us  20.0%  compute    add x2     program.py:9\n"
        "        1 us  10.0%  launch     launch\n"
        "waited          8 us, 4 engines together\n"
        "        8 us 100.0%  wait       wait for flag[0] >= 1 x8  program.py:8"
    )


def test_long_lists_end_in_a_sum():
    timeline = grid(1, 4)
    many = tuple(
        span.__class__(0, "a", "u", f"step {i}", "compute", i * US, (i + 1) * US, cause=i - 1 if i else None)
        for i, span in enumerate(timeline.spans[:10])
    )
    text = summary(Timeline("device", many, (), 10 * US))
    assert "at least" not in text and "waited" not in text and "4 more" in text
    assert text.count("step") == 1 + 6


def test_memory_is_told_from_the_cache_of_its_name():
    uses = tuple(Use("device 0", name, 4 * US, "memory") for name in ("l2", "l2 cache"))
    text = summary(Timeline("device", ring().spans, uses, 10 * US, titles={"l2": "HBM3e"}))
    assert "(40%), by l2 (HBM3e) of device 0\n" in text
    assert "  l2 (HBM3e) ########............  40.0%\n  l2 cache   ########" in text


def test_nothing_happened():
    assert summary(Timeline("device", (), (), 0.0)) == "simulated time  0 s"
