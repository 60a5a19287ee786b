# SPDX-License-Identifier: MIT
"""Figures of the language and of the machine: levels, scales, layouts, copies, phases, overlap, memory."""

from __future__ import annotations

from docs.figures.style import Figure
from tilescale.hda import Machine
from tilescale.hda.units import format_bandwidth, format_bytes


def levels() -> Figure:
    """Every level of a GPU server inside the next coarser one, with what joins its units."""
    figure = Figure(
        "The levels of a machine, each inside the next: node, device, cluster, block, warpgroup, warp", 440, 316
    )
    frames = [
        ("node", "NVLink joins devices", "unit"),
        ("device", "l2 (HBM) is shared by blocks", "plain"),
        ("cta_cluster", "DSMEM joins blocks", "unit"),
        ("block", "l1 (shared memory)", "plain"),
        ("warpgroup", "l0 (registers)", "unit"),
    ]
    for depth, (name, memory, kind) in enumerate(frames):
        x, y = 8 + 14 * depth, 8 + 38 * depth
        figure.box(x, y, 424 - 28 * depth, 300 - 52 * depth, kind)
        figure.text(x + 12, y + 19, name, "bold", anchor="start")
        figure.text(x + 412 - 28 * depth, y + 19, memory, "soft", 12, anchor="end")
    for warp in range(4):
        figure.box(78 + 72 * warp, 206, 66, 34, f"d{warp}", f"warp {warp}")
    return figure


def scale() -> Figure:
    """Who executes inside a scale, and whose ranks are meant."""
    figure = Figure("T.Scale: a finer level executes, a coarser one selects whose ranks are meant", 440, 420)
    panels = [
        ('with T.Scale("block"):', "each block executes; ranks are blocks", "block"),
        ('with T.Scale("warpgroup"):', "finer: each warpgroup executes", "warpgroup"),
        ('with T.Scale("device"):', "coarser: blocks still execute; ranks are devices", "device"),
    ]
    for number, (code, what, level) in enumerate(panels):
        top = 8 + 140 * number
        figure.text(8 + 30 * (number > 0), top + 8, code, "code", 13, "start")
        figure.text(432, top + 28, what, "soft", 13, "end")
        for device in range(2):
            _device(figure, 8 + 222 * device, top + 42, device, level)
    for block in range(2):
        x, low = 62 + 96 * block, 406 + 9 * block
        figure.arrow((x, 396), (x, low), (x + 222, low), (x + 222, 394))
    return figure


def _device(figure: Figure, x: float, y: float, device: int, level: str) -> None:
    """A device with two blocks of two warpgroups; what executes has a colour, one for each rank."""
    figure.box(x, y, 202, 72, "unit")
    figure.text(x + 8, y + 11, f"device {device}", "soft", 11, "start")
    for block in range(2):
        bx = x + 8 + 96 * block
        rank = device if level == "device" else block
        figure.box(bx, y + 22, 90, 44, f"d{rank}" if level != "warpgroup" else "plain")
        for wg in range(2):
            label = f"rank {wg}" if level == "warpgroup" else ""
            figure.box(bx + 5 + 41 * wg, y + 42, 39, 19, f"d{wg}" if label else "frame", label, size=11)
        label = f"rank {rank}" if level != "warpgroup" else f"block {block}"
        figure.text(bx + 45, y + 32, label, "" if level != "warpgroup" else "soft", 11)


def layouts() -> Figure:
    """Which part of a tensor each of four units holds."""
    figure = Figure("Layouts of a view over four units: FullRow, FullCol, Shard in blocks, Replica", 440, 184)
    shown = [
        ("T.FullRow", ["0000", "1111", "2222", "3333"]),
        ("T.FullCol", ["0123"] * 4),
        ("T.Shard(0, block=1)", ["00000000", "11111111", "22222222", "33333333"] * 2),
        ("T.Replica", ["++++"] * 4),
    ]
    for number, (name, rows) in enumerate(shown):
        x = 10 + 110 * number
        figure.tiles(x, 10, rows, (92 / len(rows[0]), 92 / len(rows)))
        name, _, rest = name.partition("(")
        figure.text(x + 46, 116, name, "code")
        figure.text(x + 46, 132, f"({rest}" if rest else "", "code", 12)
    for unit in range(4):
        figure.box(60 + 78 * unit, 150, 18, 18, f"d{unit}")
        figure.text(82 + 78 * unit, 159, f"unit {unit}", size=12, anchor="start")
    figure.box(372, 150, 18, 18, "sum")
    figure.text(394, 159, "all", size=12, anchor="start")
    return figure


def put_with_signal() -> Figure:
    """A remote copy and its signal: what the sender wrote happens before what the receiver reads."""
    figure = Figure("Put with signal: the data is visible to who has waited for the flag", 460, 262)
    for x, device, kind in (12, 0, "d0"), (250, 1, "d1"):
        figure.text(x + 99, 14, f"device {device}", "bold")
        steps = (
            ["T.copy(tile, X, dst=1)", "T.signal(flag, dst=1)"]
            if device == 0
            else ['T.wait(flag, ">=", 1)', "T.copy(X, tile)"]
        )
        for number, step in enumerate(steps):
            figure.box(x, 44 + 72 * number + 100 * device, 198, 34, kind, step, "code")
    figure.arrow((210, 61), (330, 61), (330, 142))
    figure.text(270, 50, "data into X", "data", 12)
    figure.arrow((210, 133), (276, 133), (276, 142), kind="signal")
    figure.text(218, 122, "flag += 1", "signal", 12, "start")
    figure.arrow((52, 79), (52, 115), kind="line")
    figure.text(62, 97, "release: first the data", "soft", 12, "start")
    figure.arrow((290, 179), (290, 215), kind="line")
    figure.text(300, 197, "acquire: then the data", "soft", 12, "start")
    return figure


def ring() -> Figure:
    """A ring all-gather, step by step: in each one every device passes on what it got last."""
    figure = Figure("A ring all-gather over four devices, step by step", 460, 262)
    for step in range(4):
        top = 26 + 60 * step
        figure.text(4, top + 14, f"step {step}" if step else "start", "bold", 12, "start")
        for device in range(4):
            x = 64 + 102 * device
            if step == 0:
                figure.text(x + 40, 10, f"device {device}", size=12)
            held = {(device - back) % 4 for back in range(step + 1)}
            for slot in range(4):
                figure.box(
                    x + 20 * slot,
                    top,
                    20,
                    28,
                    f"d{slot}" if slot in held else "plain",
                    str(slot) if slot in held else "",
                )
            if step < 3:
                slot = (device - step) % 4
                begin = (x + 20 * slot + 10, top + 28)
                if device < 3:
                    figure.arrow(begin, (x + 102 + 20 * slot + 10, top + 60))
                else:
                    figure.arrow(begin, (64 + 20 * slot + 10, top + 60))
    return figure


def phases() -> Figure:
    """Phases of a device follow one another: a grid of blocks, whole tensors, a grid again."""
    figure = Figure("A grid phase, a device phase and a grid phase on two devices", 460, 252)
    for x, w, name in (80, 110, "grid phase"), (204, 116, "device phase"), (334, 110, "grid phase"):
        figure.text(x + w / 2, 14, name, "bold", 12)
    for device in range(2):
        top = 30 + 96 * device
        figure.text(6, top + 40, f"device {device}", size=12, anchor="start")
        for x in 80, 334:
            figure.box(x, top, 110, 80, "frame")
            for block in range(2):
                figure.box(x + 8, top + 8 + 34 * block, 94, 30, f"d{device}", f"block {block}")
    figure.box(204, 30, 116, 176, "sum")
    figure.text(262, 108, "T.allreduce(Y)", "code", 12)
    figure.text(262, 126, "whole tensors", "soft", 12)
    figure.arrow((80, 226), (444, 226), kind="line")
    figure.text(444, 240, "time", "soft", 11, "end")
    return figure


def overlap() -> Figure:
    """All-gather and GEMM one after the other, and with the gather beside the grid."""
    figure = Figure("All-gather and GEMM: in order, and overlapped", 460, 246)
    figure.text(8, 12, "in order", "bold", anchor="start")
    in_order = [("copy queue", [(3, "sum", "gather A")]), ("tensor cores", [(3, "", ""), (4, "d0", "multiply")])]
    figure.bars(100, 28, in_order, 46)
    figure.text(8, 134, "overlapped", "bold", anchor="start")
    chunks = [(1, "d1", "A1"), (1, "d2", "A2"), (1, "d3", "A3")]
    tiles = [(1, "d0", "A0 B"), (1, "d1", "A1 B"), (1, "d2", "A2 B"), (1, "d3", "A3 B")]
    figure.bars(100, 150, [("copy queue", chunks), ("tensor cores", [(0.15, "", ""), *tiles])], 46)
    return figure


def memory() -> Figure:
    """The memory layers of one machine, who owns them, how large and how fast they are."""
    machine = Machine.load("h200-sxm-8")
    figure = Figure("Memory layers of h200-sxm-8, with the owner, the size and the bandwidth of each", 460, 336)
    named = {layer.name: layer for layer in machine.memory}
    rows = [("l0", "registers"), ("l1", "shared memory"), ("", ""), ("l2", "HBM3e"), ("l3", "host memory")]
    for number, (name, title) in enumerate(rows):
        y, inset = 8 + 66 * number, 66 - 15 * number
        if not name:
            device = named["l2"]
            text = f"L2 cache: {format_bytes(device.cache_capacity)}, {format_bandwidth(device.cache_bandwidth)}"
            figure.box(inset, y + 8, 460 - 2 * inset, 38, "frame", text)
            continue
        layer = named[name]
        figure.box(inset, y, 460 - 2 * inset, 54, f"d{number % 4}")
        figure.text(inset + 12, y + 17, name, "bold", 14, "start")
        figure.text(inset + 38, y + 17, f"{title}, one for each {layer.level}", size=13, anchor="start")
        speed = f", {format_bandwidth(layer.bandwidth)}" if layer.bandwidth else ""
        figure.text(inset + 12, y + 38, f"{format_bytes(layer.capacity)}{speed}", "", 12, "start")
    return figure


FIGURES = (levels, scale, layouts, put_with_signal, ring, phases, overlap, memory)
