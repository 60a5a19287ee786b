# SPDX-License-Identifier: MIT
"""Timelines made by hand."""

from tilescale.errors import Location
from tilescale.timing.timeline import Span, Timeline, Use

US = 1e-6


def line(number: int) -> Location:
    return Location("program.py", number)


def ring(devices: int = 4, steps: int = 3) -> Timeline:
    """Every device sends to the next one, signals, waits for the one before, and adds; device 1 is slow."""
    spans = [Span(d, "device", f"device {d}", "launch", "launch", 0.0, US) for d in range(devices)]
    last, now = list(range(devices)), [US] * devices
    for _ in range(steps):
        arrivals = []
        for d in range(devices):
            cause, end = last[d], now[d] + (3 if d == 1 else 2) * US
            who = ("block 0", f"device {d}, block 0")
            spans.append(Span(d, *who, "copy", "transfer", now[d], end, nbytes=4000, where=line(7), cause=cause))
            spans.append(
                Span(d, "block 0 signals", who[1], "signal", "sync", end, end + US, where=line(7), cause=len(spans) - 1)
            )
            arrivals.append((end + US, len(spans) - 1))
            last[d], now[d] = len(spans) - 2, end
        for d in range(devices):
            at, cause = arrivals[d - 1]
            who = ("block 0", f"device {d}, block 0")
            spans.append(Span(d, *who, "wait for flag[0] >= 1", "wait", now[d], at, where=line(8), cause=cause))
            spans.append(Span(d, *who, "add", "compute", at, at + US, flops=1000, where=line(9), cause=len(spans) - 1))
            last[d], now[d] = len(spans) - 1, at + US
    uses = [Use(f"device {d}", "nvlink", 6 * US, "network") for d in range(devices)]
    uses += [Use(f"device {d}", "vector", steps * US, "compute") for d in range(devices)]
    return Timeline("device", tuple(spans), tuple(uses), max(span.end_s for span in spans))


def grid(devices: int = 2, blocks: int = 132) -> Timeline:
    """Hundreds of programs whose loads run two at a time ahead of them, then an all-reduce."""
    spans = []
    for d in range(devices):
        spans.append(Span(d, "device", f"device {d}", "launch", "launch", 0.0, US))
        for b in range(blocks):
            unit, end = f"device {d}, block {b}", (4 + b % 3) * US
            for begin in (1.0, 1.5):
                at = begin * US
                spans.append(Span(d, f"block {b} ahead", unit, "copy", "transfer", at, at + US, where=line(3)))
            spans.append(Span(d, f"block {b}", unit, "gemm", "compute", 2.5 * US, end, flops=10**6, where=line(4)))
        spans.append(Span(d, "device", f"device {d}", "allreduce", "collective", 6 * US, 9 * US, nbytes=1 << 20))
    return Timeline("device", tuple(spans), (), 9 * US)
