# SPDX-License-Identifier: MIT
"""Figures of the examples about attention and about roles inside a block."""

from __future__ import annotations

from docs.figures.style import Figure


def flash_mla() -> Figure:
    """Partial outputs with their log-sums, merged by an all-reduce."""
    figure = Figure(
        "Context-parallel decode: each device attends to its keys, and partial results are merged", 440, 214
    )
    figure.box(160, 8, 120, 28, "sum", "query of the new token", size=10)
    for device in range(4):
        x = 10 + 108 * device
        figure.arrow((220, 36), (x + 48, 60))
        figure.box(x, 62, 96, 30, f"d{device}", f"keys of device {device}", size=10)
        figure.box(x, 116, 96, 32, f"d{device}", "output, log-sum", size=11)
        figure.arrow((x + 48, 92), (x + 48, 114))
        figure.arrow((x + 48, 148), (220, 176))
    figure.box(110, 178, 220, 30, "sum", "T.allreduce(out, lse, fn=merge)", "code", 11)
    return figure


def ring_attention() -> Figure:
    """Queries stay, keys and values travel."""
    figure = Figure("Ring attention: queries stay, keys and values go round, two buffers on each device", 440, 236)
    for device in range(4):
        x = 10 + 108 * device
        figure.text(x + 46, 12, f"device {device}", size=12)
        figure.box(x, 24, 92, 160, "unit")
        figure.box(x + 8, 32, 76, 34, f"d{device}", f"Q{device} stays")
        figure.box(x + 8, 84, 76, 38, f"d{device}", f"K{device} V{device}")
        figure.box(x + 8, 134, 76, 38, f"d{(device - 1) % 4}", f"K{(device - 1) % 4} V{(device - 1) % 4}")
    for device in range(3):
        figure.arrow((94 + 108 * device, 104), (125 + 108 * device, 150))
    figure.text(8, 226, "upper buffer: used now; lower buffer: filled for the next step", "soft", 12, "start")
    figure.arrow((418, 108), (436, 108), (436, 202), (4, 202), (4, 152), (18, 152))
    return figure


def ulysses() -> Figure:
    """From tokens over devices to heads over devices."""
    figure = Figure("Ulysses attention: an all-to-all from a split by tokens to a split by heads, and back", 460, 178)
    by_tokens = ["0000", "1111", "2222", "3333"]
    for x, rows, name in (34, by_tokens, "by tokens"), (190, ["0123"] * 4, "by heads"), (346, by_tokens, "by tokens"):
        figure.tiles(x, 24, rows, 24)
        figure.text(x + 48, 12, name, "bold", 12)
    for x in 134, 290:
        figure.arrow((x, 72), (x + 52, 72))
        figure.text(x + 26, 136, "all-to-all", "data", 12)
    figure.text(238, 136, "attention", size=12)
    figure.text(238, 160, "head by head, over all tokens", "soft", 12)
    return figure


def roles() -> Figure:
    """A loading warpgroup ahead of two that multiply."""
    figure = Figure("Roles: one warpgroup loads tiles ahead, two multiply", 460, 188)
    loads = [(0.8, f"d{k % 2}", f"load {k}") for k in range(2)]
    loads += [(0.6, "wait", "wait"), (0.8, "d0", "load 2"), (0.3, "wait", ""), (0.8, "d1", "load 3")]
    halves = [
        [(0.8, "wait", "wait"), *((1.1, f"d{k % 2}", f"{half} {k}") for k in range(3))] for half in ("upper", "lower")
    ]
    figure.bars(96, 10, [("warpgroup 0", loads), ("warpgroup 1", halves[0]), ("warpgroup 2", halves[1])], 84)
    figure.box(96, 142, 16, 16, "d0")
    figure.text(118, 150, "stage 0 in shared memory", "soft", 12, "start")
    figure.box(280, 142, 16, 16, "d1")
    figure.text(302, 150, "stage 1", "soft", 12, "start")
    figure.text(96, 176, "full[stage]: tile is there; empty[stage]: it is used up", "signal", 12, "start")
    return figure


def sender_role() -> Figure:
    """One warpgroup multiplies, the other sends what is done."""
    figure = Figure("Sender role: a warpgroup sends a finished tile while the other computes the next", 460, 196)
    work = [(1, f"d{tile % 2}", f"tile {tile}") for tile in range(4)]
    sends = [(1, "", ""), *((0.9, f"d{tile % 2}", f"send {tile}") for tile in range(3))]
    figure.bars(96, 10, [("warpgroup 1", work), ("warpgroup 0", sends)], 84)
    figure.text(8, 126, "shared memory", size=12, anchor="start")
    for place in range(2):
        figure.box(112 + 90 * place, 112, 84, 28, f"d{place}", f"place {place}")
    figure.arrow((286, 126), (330, 126))
    figure.box(334, 104, 116, 44, "sum", "C of all devices")
    figure.text(96, 176, "full[place]: may be sent; empty[place]: may be filled", "signal", 12, "start")
    return figure
