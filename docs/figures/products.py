# SPDX-License-Identifier: MIT
"""Figures of the examples that multiply matrices over devices: what is split, what travels, and when."""

from __future__ import annotations

from docs.figures.style import Figure

SPLIT_ROWS, SPLIT_COLS = ["0000", "1111", "2222", "3333"], ["0123"] * 4
ALL = ["++++"] * 4


def product(figure: Figure, y: float, a: list[str], b: list[str], c: list[str], names: tuple[str, str, str]) -> None:
    """A x B = C as three matrices, each with a line that says how it lies."""
    for x, rows, name, sign in (20, a, names[0], "x"), (172, b, names[1], "="), (324, c, names[2], ""):
        figure.tiles(x, y, rows, 96 / len(rows[0]))
        figure.text(x + 48, y + 112, name, "soft", 12)
        if sign:
            figure.text(x + 124, y + 48, sign, "bold", 18)


def ag_gemm() -> Figure:
    """Which shard each step needs."""
    figure = Figure("All-gather and GEMM: tiles of the own shard first, then each shard as it arrives", 440, 262)
    product(figure, 8, SPLIT_ROWS, SPLIT_COLS, SPLIT_COLS, ("A, by rows", "B, by columns", "C, by columns"))
    tiles = [(1, f"d{shard}", f"C{shard}") for shard in (1, 2, 3, 0)]
    figure.text(8, 150, "device 1, in the order in which the shards of A arrive", "soft", 12, "start")
    figure.bars(86, 166, [("send", [(0.7, "d1", "A1")]), ("multiply", [(0.7, "", ""), *tiles])], 66)
    return figure


def gemm_rs() -> Figure:
    """A finished tile goes straight to the device that owns its rows."""
    figure = Figure("GEMM and reduce-scatter: each tile goes to its owner, who adds up the parts", 440, 296)
    product(figure, 8, SPLIT_COLS, SPLIT_ROWS, SPLIT_ROWS, ("A, by columns", "B, by rows", "C, by rows"))
    for device in range(4):
        x = 20 + 106 * device
        figure.tiles(x, 166, [str(device)] * 4, (84, 14))
        figure.text(x + 42, 154, f"device {device}", size=12)
    for device in range(4):
        figure.arrow((62 + 106 * device, 201), (221, 244))
    figure.box(161, 246, 120, 26, "d2", "sum on device 2")
    figure.text(221, 286, "rows 2 of every device's part", "soft", 12)
    return figure


def tp_gemm() -> Figure:
    """The same split and the same sum, over devices and over warpgroups."""
    figure = Figure("Tensor-parallel GEMM: the same split and the same sum at two levels", 440, 324)
    product(figure, 8, ["0123"] * 4, SPLIT_ROWS, ALL, ("FullCol", "FullRow", "Replica"))
    figure.text(8, 148, "devices: all-reduce through l2 (NVLink)", "bold", 12, "start")
    product(figure, 176, ["0011"] * 4, ["0000", "0000", "1111", "1111"], ALL, ("FullCol", "FullRow", "Replica"))
    figure.text(8, 314, "warpgroups: all-reduce through l1 (shared memory)", "bold", 12, "start")
    return figure


def cluster_gemm() -> Figure:
    """Each block loads half of b, and both multiply with the whole."""
    figure = Figure("Cluster GEMM: two blocks load half of b each and multiply with the whole of it", 440, 216)
    figure.box(6, 6, 428, 204, "frame")
    figure.text(20, 22, "cta_cluster: c (256, 128) += a (256, 64) b (64, 128)", "bold", 12, "start")
    for block in range(2):
        y = 40 + 84 * block
        figure.box(20, y, 400, 74, "unit")
        figure.text(30, y + 14, f"block {block}", "soft", 12, "start")
        figure.box(34, y + 28, 90, 36, f"d{block}", "a, its rows")
        figure.box(150, y + 28, 50, 36, "d0" if block == 0 else "plain", "b left" if block == 0 else "")
        figure.box(200, y + 28, 50, 36, "d1" if block == 1 else "plain", "b right" if block == 1 else "")
        figure.box(300, y + 28, 100, 36, f"d{block}", "c, its rows")
        figure.arrow((256, y + 46), (294, y + 46), kind="line")
    figure.arrow((175, 104), (175, 152))
    figure.arrow((225, 152), (225, 104))
    figure.text(268, 119, "DSMEM", "data", 12)
    return figure


def gemm_all_reduce() -> Figure:
    """A tile is reduced one turn after it was multiplied."""
    figure = Figure("GEMM and all-reduce: a block reduces the tile of the turn before", 460, 206)
    figure.text(8, 12, "one block", "bold", anchor="start")
    work = [(1, "d0", "make t0"), (1, "d1", "make t1"), (0.6, "d0", "sum t0"), (1, "d2", "make t2")]
    work.append((0.6, "d1", "sum t1"))
    links = [(1, "", ""), (1, "d0", "parts of t0"), (1.2, "d1", "parts of t1"), (0.4, "", ""), (0.9, "d2", "of t2")]
    figure.bars(76, 28, [("compute", work), ("links", links)], 78)
    figure.text(8, 140, "the whole device", "bold", anchor="start")
    for tile in range(8):
        figure.box(76 + 46 * tile, 154, 42, 26, f"d{tile % 4}", f"t{tile}")
    figure.text(8, 167, "owners", size=12, anchor="start")
    figure.text(76, 195, "the owner of a tile adds up its parts and sends the sum to all", "soft", 12, "start")
    return figure


def cannon() -> Figure:
    """Blocks of A move to the left, blocks of B upwards."""
    figure = Figure("Cannon's algorithm: after the skew, A moves left and B moves up in every step", 460, 276)
    for i in range(3):
        for j in range(3):
            x, y, k = 50 + 132 * j, 34 + 80 * i, (i + j) % 3
            figure.box(x, y, 96, 48, "unit")
            figure.box(x + 5, y + 5, 41, 38, f"d{k}", f"A{i}{k}")
            figure.box(x + 50, y + 5, 41, 38, f"d{k}", f"B{k}{j}")
            if j:
                figure.arrow((x - 3, y + 24), (x - 33, y + 24))
            if i:
                figure.arrow((x + 70, y - 3), (x + 70, y - 29))
    for i in range(3):
        figure.arrow((47, 58 + 80 * i), (18, 58 + 80 * i))
        figure.arrow((120 + 132 * i, 31), (120 + 132 * i, 8))
    figure.text(230, 266, "what leaves at one side comes back at the other", "soft", 12)
    return figure


def summa() -> Figure:
    """A panel of A along the rows, a panel of B down the columns."""
    figure = Figure("SUMMA: for each panel k, A goes along the rows of devices and B down the columns", 460, 246)
    figure.text(284, 10, "panel k of B", "soft", 12)
    figure.text(6, 46, "panel k of A", "soft", 12, "start")
    for j in range(4):
        figure.box(124 + 84 * j, 22, 66, 20, "d1", f"B[k, {j}]")
        figure.arrow((157 + 84 * j, 44), (157 + 84 * j, 72))
    for i in range(3):
        y = 74 + 58 * i
        figure.box(14, y + 9, 66, 20, "d0", f"A[{i}, k]")
        figure.arrow((82, y + 19), (122, y + 19))
        for j in range(4):
            figure.box(124 + 84 * j, y, 66, 38, "sum", f"C{i}{j}")
            if j < 3:
                figure.arrow((190 + 84 * j, y + 19), (206 + 84 * j, y + 19))
            if i < 2:
                figure.arrow((157 + 84 * j, y + 38), (157 + 84 * j, y + 56))
    return figure


def ag_gemm_overlapped() -> Figure:
    """The copy queue of every device sends; its grid multiplies what has come."""
    figure = Figure("All-gather and GEMM overlapped: the copy queue sends while the grid multiplies", 460, 176)
    figure.text(8, 12, "device 1 of 4", "bold", anchor="start")
    sends = [(1, "d1", "A1 to 2"), (1, "d1", "A1 to 3"), (1, "d1", "A1 to 0")]
    comes = [(1, "d0", "A0"), (1, "d3", "A3"), (1, "d2", "A2")]
    grid = [(1.1, "d1", "A1 B"), (1, "d0", "A0 B"), (1, "d3", "A3 B"), (1, "d2", "A2 B")]
    figure.bars(92, 28, [("copy queue", sends), ("arrives", comes), ("grid", grid)], 80)
    for step in range(3):
        figure.arrow((172 + 80 * step, 78), (186 + 80 * step, 92), kind="signal")
    figure.text(92, 158, "each arrival raises a flag, and a tile waits for its rows", "signal", 12, "start")
    return figure


def gemm_rs_overlapped() -> Figure:
    """Copies that were started before the grid, and wait for the tiles of their rows."""
    figure = Figure("GEMM and reduce-scatter overlapped: a copy waits until the tiles of its rows are made", 460, 176)
    figure.text(8, 12, "device 1 of 4", "bold", anchor="start")
    grid = [(1, "d2", "rows of 2"), (1, "d3", "rows of 3"), (1, "d0", "rows of 0"), (1, "d1", "own"), (0.5, "sum", "+")]
    sends = [(1, "", ""), (1, "d2", "to 2"), (1, "d3", "to 3"), (1, "d0", "to 0")]
    comes = [(1, "", ""), (1, "d1", "from 0"), (1, "d1", "from 3"), (1, "d1", "from 2")]
    figure.bars(92, 28, [("grid", grid), ("copy queue", sends), ("arrives", comes)], 78)
    for step in range(3):
        figure.arrow((156 + 78 * step, 50), (178 + 78 * step, 64), kind="signal")
    figure.text(92, 158, 'tiles count up a flag; the copy runs after=(flag, ">=", n)', "signal", 12, "start")
    return figure


def grouped_experts() -> Figure:
    """Rows for experts come in while rows that are there are multiplied, and results leave while others are made."""
    figure = Figure("Experts in phases: a tile waits for the rows it reads, a chunk leaves when it is made", 464, 200)
    figure.text(8, 12, "device 1 of 4", "bold", anchor="start")
    comes = [(1, "d0", "from 0"), (1, "d3", "from 3"), (1, "d2", "from 2")]
    up = [(1, "d1", "own"), (1, "d0", "of 0"), (1, "d3", "of 3"), (1, "d2", "of 2")]
    down = [(4, "", ""), (1, "d2", "for 2"), (1, "d3", "for 3"), (1, "d0", "for 0"), (1, "d1", "own")]
    sends = [(5, "", ""), (1, "d2", "to 2"), (1, "d3", "to 3"), (1, "d0", "to 0")]
    figure.bars(82, 28, [("arrives", comes), ("grid: up", up), ("grid: down", down), ("queue", sends)], 45)
    for step in range(3):
        figure.arrow((127 + 45 * step, 52), (127 + 45 * step, 60), kind="signal")
        figure.arrow((307 + 45 * step, 116), (307 + 45 * step, 124), kind="signal")
    figure.text(82, 190, "within the rows of a device: expert by expert", "soft", 12, "start")
    return figure
