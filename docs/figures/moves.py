# SPDX-License-Identifier: MIT
"""Figures of the examples that move tensors between devices: copies, signals and collectives by hand."""

from __future__ import annotations

from docs.figures.style import Figure


def neighbour_shift() -> Figure:
    """Every device writes into the next one."""
    figure = Figure("Neighbour shift: every device copies its A into the B of the next one", 440, 168)
    for device in range(4):
        x = 10 + 110 * device
        figure.box(x, 26, 90, 120, "unit")
        figure.text(x + 45, 13, f"device {device}", size=12)
        figure.box(x + 12, 36, 66, 40, f"d{device}", f"A = {device}")
        figure.box(x + 12, 96, 66, 40, f"d{(device - 1) % 4}", f"B = {(device - 1) % 4}")
    for device in range(3):
        figure.arrow((88 + 110 * device, 60), (130 + 110 * device, 108))
    figure.arrow((408, 56), (436, 56), (436, 158), (4, 158), (4, 116), (20, 116))
    return figure


def put_with_credit() -> Figure:
    """Data and flag one way, the credit back."""
    figure = Figure("Put with signal: data and flag go one way, a credit comes back", 440, 186)
    for x, name, kind in (10, "device r", "d0"), (280, "device r + 1", "d1"):
        figure.box(x, 24, 150, 154, "unit")
        figure.text(x + 75, 12, name, size=12)
        figure.box(x + 15, 36, 120, 36, kind, "tile" if x == 10 else "inbox[b]", "" if x == 10 else "code")
        figure.box(x + 15, 82, 120, 36, "plain", "" if x == 10 else "arrived[b]", "code")
        figure.box(x + 15, 130, 120, 36, "plain", "free[b]" if x == 10 else "", "code")
    figure.text(85, 100, "after the data", "soft")
    figure.text(355, 148, "inbox is read", "soft")
    figure.arrow((145, 54), (294, 54))
    figure.arrow((145, 100), (294, 100), kind="signal")
    figure.arrow((295, 148), (147, 148), kind="signal")
    figure.text(220, 42, "1  put", "data", 12)
    figure.text(220, 88, "2  signal", "signal", 12)
    figure.text(220, 136, "3  credit", "signal", 12)
    return figure


def all_gather() -> Figure:
    """One shard each before, all shards everywhere after."""
    figure = Figure("All-gather: every device ends with the shards of all", 440, 160)
    for device in range(4):
        x = 12 + 108 * device
        figure.text(x + 45, 12, f"device {device}", size=12)
        figure.box(x + 18, 24, 54, 34, f"d{device}", f"shard {device}", size=11)
        figure.tiles(x - 3, 112, ["0123"], 24, labels=True)
        for target in range(4):
            figure.arrow((x + 45, 58), (21 + 108 * target + 24 * device, 110))
    figure.text(220, 150, "whole tensors in a phase, or tile by tile in a grid", "soft", 12)
    return figure


def all_reduce() -> Figure:
    """Two shots: to the owner of a part, and from it to all."""
    figure = Figure("All-reduce in two shots: each owner adds up its part and sends the sum to all", 460, 300)
    figure.text(8, 12, "every device has a tensor of four parts", "soft", 12, "start")
    figure.text(452, 162, "owner b adds up part b", "soft", 12, "end")
    for device in range(4):
        x = 18 + 112 * device
        figure.tiles(x, 24, [str(device) * 4], 22)
        row = ["." * device + "+" + "." * (3 - device)]
        figure.tiles(x, 124, row, 22)
        figure.tiles(x, 224, ["++++"], 22)
        figure.arrow((x + 33, 48), (161, 122))
        figure.arrow((161, 148), (x + 33, 222))
        figure.text(x + 44, 260, f"device {device}", size=12)
    figure.text(230, 284, "drawn: part 1, whose owner device 1 sends the sum to all", "data", 12)
    return figure


def all_to_all() -> Figure:
    """A transpose of parts over devices."""
    figure = Figure("All-to-all: part j of device i becomes part i of device j", 440, 190)
    for device in range(4):
        y = 30 + 36 * device
        figure.text(66, y + 15, f"device {device}", size=12, anchor="end")
        for part in range(4):
            figure.box(74 + 36 * part, y, 34, 30, f"d{device}", f"{'abcd'[device]}{part}")
            figure.box(280 + 36 * part, y, 34, 30, f"d{part}", f"{'abcd'[part]}{device}")
    figure.arrow((226, 99), (270, 99))
    figure.text(145, 14, "to 0, 1, 2, 3", "soft", 12)
    figure.text(352, 14, "from 0, 1, 2, 3", "soft", 12)
    return figure


def mixture_of_experts() -> Figure:
    """Tokens go to their experts and come back weighted."""
    figure = Figure("Mixture of experts: tokens go to the experts they chose and come back weighted", 460, 246)
    chosen = [(0, 0, 1), (1, 0, 3), (2, 2, 3)]
    for x, name in (48, "tokens"), (230, "experts"), (412, "results"):
        figure.text(x, 12, name, size=12)
    for device, picks in enumerate(chosen):
        for token, expert in enumerate(picks):
            y = 26 + 62 * device + 19 * token
            for x in 14, 378:
                figure.box(x, y, 68, 16, f"d{device}", f"token {3 * device + token}", size=12)
            figure.arrow((82, y + 8), (188, 52 + 50 * expert))
            figure.arrow((272, 52 + 50 * expert), (376, y + 8))
    for expert in range(4):
        figure.box(190, 34 + 50 * expert, 80, 36, "sum", f"expert {expert}")
    figure.text(230, 236, "the number of tokens travels in the signal", "signal", 12)
    return figure


def two_nodes() -> Figure:
    """Sums inside a node first; only sums cross."""
    figure = Figure("Two nodes: devices of a node add up shares, and only the sums cross between nodes", 460, 236)
    for node in range(2):
        x = 8 + 232 * node
        figure.box(x, 24, 212, 158, "unit")
        figure.text(x + 106, 12, f"node {node}: NVLink inside", "bold", 12)
        for device in range(2):
            dx = x + 12 + 98 * device
            figure.box(dx, 36, 90, 26, f"d{2 * node + device}", f"device {device}")
            figure.box(dx, 128, 90, 40, "sum", f"sum, share {device}")
            for other in range(2):
                figure.arrow((dx + 45, 62), (x + 57 + 98 * other, 126))
    for device in range(2):
        begin, low = 65 + 98 * device, 194 + 14 * device
        figure.arrow((begin, 168), (begin, low), (begin + 232, low), (begin + 232, 170), kind="signal")
    figure.text(230, 226, "between nodes: InfiniBand, each share once", "signal", 12)
    return figure


def wafer_mesh() -> Figure:
    """A ring folded onto a row of cores: no step is further than two hops."""
    figure = Figure("A ring folded onto a row of a mesh: neighbours are at most two cores apart", 460, 196)
    places = [0, 2, 4, 5, 3, 1]
    centre = [44 + 74 * position for position in range(6)]
    for position in range(6):
        figure.box(centre[position] - 26, 76, 52, 40, "unit", f"core {position}", size=11)
        if position < 5:
            figure.line((centre[position] + 26, 96), (centre[position] + 48, 96))
    for step, place in enumerate(places):
        target = places[(step + 1) % 6]
        out = step < 2
        if abs(target - place) == 1:
            y = 118 if place == 1 else 74
            figure.arrow(
                (centre[place], y), (centre[target], y), bend=26 if target > place else (-26 if place != 1 else 26)
            )
            continue
        y = 74 if out else 118
        figure.arrow((centre[place] + 6 * (1 if out else -1), y), (centre[target], y), bend=46)
    figure.text(230, 22, "out: even cores", "data", 12)
    figure.text(230, 180, "back: odd cores", "data", 12)
    return figure


def stacked_dram() -> Figure:
    """A flows to the right, sums flow down, the weights stay."""
    figure = Figure("Systolic product under stacked DRAM: weights stay, rows of A flow right, sums flow down", 440, 266)
    for i in range(3):
        y = 34 + 70 * i
        figure.box(8, y + 8, 64, 26, f"d{i}", f"A[:, {i}]")
        figure.arrow((74, y + 21), (108, y + 21))
        for j in range(3):
            x = 110 + 108 * j
            figure.box(x, y, 76, 42, "sum", f"B{i}{j} stays")
            if j < 2:
                figure.arrow((x + 76, y + 21), (x + 106, y + 21))
            figure.arrow((x + 38, y + 42), (x + 38, y + 68), kind="signal")
    for j in range(3):
        figure.text(148 + 108 * j, 24, "zero", "soft", 11)
        figure.text(148 + 108 * j, 254, f"C[:, {j}]", "signal", 12)
    figure.text(8, 10, "vaults", "bold", 12, "start")
    return figure
