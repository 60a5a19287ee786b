# SPDX-License-Identifier: MIT
"""Output of an emulation: its report, its progress bar, and its small memory use."""

import gc
import re
import tracemalloc

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import blank, values
from tilescale.backends.emulator.execute.programs import ProgramInstance
from tilescale.timing.live import RunningTask


def copy_program(blocks, tile):
    @T.prim_func
    def program(X: T.Tensor((blocks, tile), "float32"), Y: T.Tensor((blocks, tile), "float32")):
        with T.Kernel(blocks, threads=1024) as b:
            shared = T.alloc_shared((tile,), "float32")
            T.copy(X[b, 0], shared)
            T.copy(shared, Y[b, 0])

    return program


def test_a_tile_wholly_outside_of_its_tensor_is_told():
    """A tile that reaches over the end is cut off, as on GPUs; one that begins after it is allowed too, and rarely
    intended.
    """

    @T.prim_func
    def program(X: T.Tensor((40,), "float32"), Y: T.Tensor((40,), "float32")):
        with T.Kernel(4, threads=32) as b:
            tile = T.alloc_shared((16,), "float32")
            T.copy(X[b * 16], tile)
            T.copy(tile, Y[b * 16])

    x, y = values(0, 40), blank(40)
    text = str(tilescale.emulate(program, [x, y]))
    assert torch.equal(x, y)
    (load, store) = [line for line in text.splitlines() if "wholly out of bounds" in line]
    assert "of X x1  test_reports.py:" in load and "of Y x1  test_reports.py:" in store


def test_traffic_and_signals_are_counted_for_each_device():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=2, threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.copy(X[b * 4], tile)
                with T.Scale("device") as (rank, _):
                    if rank == 0:
                        T.copy(tile, Y[b * 4], dst=2, signal=F[0])
                    if rank == 1:
                        T.copy(X[b * 4], tile, src=0)

    args = [[values(r, 8), blank(8), torch.zeros(1, dtype=torch.int32)] for r in range(3)]
    report = tilescale.emulate(program, args)
    assert [(a.sent, a.received, a.messages, a.signals) for a in report.activity] == [
        (64, 0, 2, 2),
        (0, 32, 2, 0),
        (0, 32, 0, 0),
    ]
    assert [a.programs for a in report.activity] == [2, 2, 2]
    rows = str(report).splitlines()
    assert "sent" in rows[0] and rows[4].startswith("simulated time")
    untimed = str(tilescale.emulate(program, args, time=False)).splitlines()
    assert untimed == rows[:4]


def test_many_units_that_do_the_same_share_a_line():
    with tilescale.use_machine("wafer-mesh"):

        @T.prim_func
        def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
            with T.Kernel(core=40, threads=1):
                with T.Scale("core") as (rank, _):
                    if rank == 20:
                        T.copy(X, Y, dst=21)

        report = tilescale.emulate(program, data=False)
    lines = [re.split("  +", line.strip())[:5] for line in str(report).splitlines()[:5]]
    assert lines == [
        ["core", "programs", "messages", "sent", "received"],
        ["0-19", "1", "0", "0 B", "0 B"],
        ["20", "1", "1", "32 B", "0 B"],
        ["21", "1", "0", "0 B", "32 B"],
        ["22-39", "1", "0", "0 B", "0 B"],
    ]


def test_programs_that_ended_keep_no_tiles():
    """700 programs of 108 KiB each, two resident on an SM: memory in use stays far below their sum."""
    blocks, tile = 700, 27648
    program = copy_program(blocks, tile)
    args = [torch.ones(blocks, tile), torch.empty(blocks, tile)]
    tilescale.emulate(program, args, check="none")
    gc.collect()
    tracemalloc.start()
    tilescale.emulate(program, args, check="none")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(args[1], args[0])
    assert peak < 300 * tile * 4 * 1.2  # 264 resident


def test_programs_and_tasks_that_ended_are_no_cyclic_garbage():
    """The collector would look at them again and again, and records that they refer to would stay until then."""
    program = copy_program(20, 64)
    gc.collect()
    gc.disable()
    try:
        assert tilescale.emulate(program, [torch.ones(20, 64), torch.empty(20, 64)], check="none").time_us > 0
        left = [x for x in gc.get_objects() if type(x) in (ProgramInstance, RunningTask)]
        assert len(left) <= 1  # the program that represents all
    finally:
        gc.enable()


@pytest.mark.parametrize("show", [True, False])
def test_a_progress_bar_on_a_long_run(show, monkeypatch, capsys):
    monkeypatch.setattr("tilescale.backends.progress.PATIENCE_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # make rich write to a non-terminal
    program = copy_program(20, 64)
    tilescale.emulate(program, [torch.ones(20, 64), torch.empty(20, 64)], progress=show)
    text = capsys.readouterr().err
    assert ("emulating program" in text and "20" in text) == show


def test_a_short_run_shows_no_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    program = copy_program(20, 64)
    tilescale.emulate(program, [torch.ones(20, 64), torch.empty(20, 64)], progress=True)
    assert capsys.readouterr().err.strip() == ""


def test_a_program_without_parameters():
    @T.prim_func
    def program():
        with T.Kernel(4, threads=32):
            tile = T.alloc_shared((4,), "float32")
            T.clear(tile)

    assert tilescale.emulate(program, []).activity[0].programs == 4


def test_a_report_in_a_notebook():
    @T.prim_func
    def copied(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.copy(X[b * 4], tile)
                T.copy(tile, Y[b * 4])

    report = tilescale.emulate(copied, data=False)
    assert repr(report) == "<tilescale.Report of copied on h200-sxm-8, 2 x device>"
    assert repr(report.timeline).startswith("<Timeline copied on h200-sxm-8, ") and len(repr(report.timeline)) < 100
    shown = report._repr_html_()
    assert "<b>copied</b> on h200-sxm-8" in shown and "<th>programs</th>" in shown and "simulated time" in shown
    assert "<pre style='font-family:monospace'>" in shown  # notebooks converted to HTML have no font for pre
    assert shown.count("<tr>") == 3 and "copied on h200-sxm-8" in report.plot()._repr_html_()
