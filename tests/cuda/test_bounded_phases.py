# SPDX-License-Identifier: MIT
"""Waits for phases of mbarriers end, with an error that names the barrier and the line. GPUs: never_hang.py."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.fakes import Device
from tests.cuda.support import lowered, program, ptxas, source
from tests.cuda.test_golden_text import PROGRAMS, text_of
from tests.gpu.never_hang_common import BLOCKS, phase_programs
from tilelang_core import compile as stock
from tilescale.backends.base import Target
from tilescale.backends.cuda import support
from tilescale.backends.cuda.running import execute, phase_reports
from tilescale.backends.cuda.running.phase_reports import PATIENCE, STATE
from tilescale.backends.cuda.target import target_for
from tilescale.backends.tilelang.lowering.bounded_phases import bounded_phases
from tilescale.errors import DeadlockError, WaitTimeoutError
from tilescale.hda import Machine

H200 = Machine.load("h200-sxm-8")
WAIT_LINE = "T.barrier_wait(full[1], 0)"


def plain_text() -> str:
    (compilation,) = support.lower(made := program(phase_programs()["plain"]), Target.of(made, H200)).compilations({})
    text = stock.cuda_source(compilation.func, target_for(H200))
    for rewrite in compilation.rewrites:
        text = rewrite(text)
    return text


# -- in texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_wait_of_a_kernel_is_without_bound(name: str):
    text = text_of(name)
    assert "<Barrier*>" not in text
    assert ("].wait(" in text) == ("  TILESCALE_PHASES(" in text)


@pytest.mark.parametrize("kind", ["devices", "cluster", "units"])
def test_barriers_of_programs_by_their_units_are_bounded_too(kind: str):
    text = source(phase_programs()[kind])
    assert f"  TILESCALE_PHASES({kind}_0_kernel, full);\n" in text and "<Barrier*>" not in text
    assert "full[1].wait(0, 1);" in text


def test_barriers_of_plain_programs_are_bounded_too():
    text = plain_text()
    assert "  TILESCALE_PHASES(plain_kernel, full);\n" in text and "<Barrier*>" not in text
    assert source(phase_programs()["plain"]).count("<Barrier*>") == 1, "their source is stock TileLang's"


def test_kernels_take_no_more_parameters():
    assert "(int* X, int late) {" in source(phase_programs()["units"])


def test_each_kernel_of_a_text_has_its_barriers():
    head = 'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1) {}(int* X) {{\n'
    barriers = "  auto full = reinterpret_cast<Barrier*>(full_mem);\n"
    text = bounded_phases("".join(head.format(name) + barriers for name in ("first_kernel", "second_kernel")))
    assert text.index("#ifndef TILESCALE_PHASES") < text.index("__global__")
    assert [line.strip() for line in text.splitlines() if "_kernel, full" in line] == [
        "TILESCALE_PHASES(first_kernel, full);",
        "TILESCALE_PHASES(second_kernel, full);",
    ]
    assert bounded_phases(head) == head


def test_waits_report_the_index_of_their_barrier():
    text = 'extern "C" __global__ void f_kernel(int* X) {\n  auto full = reinterpret_cast<Barrier*>(full_mem);\n'
    bounded = bounded_phases(f"{text}  full[((k & 3) + 4)].wait(((k >> 2) ^ 1));\n  full[0].arrive();\n")
    assert bounded.endswith("  full[((k & 3) + 4)].wait(((k >> 2) ^ 1), ((k & 3) + 4));\n  full[0].arrive();\n")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_bounded_waits_compile():
    said = ptxas(plain_text())
    assert "0 bytes spill stores" in said and "serialized" not in said


def test_the_emulator_finds_the_program_that_hangs():
    given = [[torch.zeros(BLOCKS, dtype=torch.int32), 0] for _ in range(2)]
    tilescale.emulate(phase_programs()["devices"], given)
    given[1][1] = 64
    with pytest.raises(DeadlockError):
        tilescale.emulate(phase_programs()["devices"], given)


# -- on the host -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The memory of the report, on a computer without GPUs."""
    words = torch.zeros(ctypes.sizeof(phase_reports._Report), dtype=torch.uint8)
    monkeypatch.setattr(phase_reports, "_page", lambda: words)
    monkeypatch.setattr(phase_reports, "_is_begun", True)
    monkeypatch.setattr(phase_reports, "_is_raised", False)
    monkeypatch.setattr(phase_reports, "_limit_s", 0.0)
    monkeypatch.setattr(phase_reports.modules, "on_load", lambda listener: None)
    yield phase_reports._Report.from_address(words.data_ptr())


def report(page: Any, names: str, index: int = 1) -> None:
    page.block[:], page.index, page.parity, page.names = (3, 1, 0), index, 0, names.encode()
    page.is_complete = 1


def register(func: Any, kernel: str) -> Any:
    made = program(func)
    for launch in made.launches:
        phase_reports.name_kernel(kernel, launch)
    return made


@pytest.mark.parametrize("kind", ["devices", "cluster", "units", "plain"])
def test_the_error_names_the_barrier_and_the_line(kind: str, page: Any):
    made = register(phase_programs()[kind], f"{kind}_0_kernel")
    phase_reports.bound_phases(2.0)
    report(page, f"{kind}_0_kernel full")
    error = phase_reports.failure()
    assert isinstance(error, WaitTimeoutError)
    assert error.message == (
        f"{kind}_0_kernel, block (3, 1, 0): waited {2 * PATIENCE} s for a phase of parity 0 of the mbarrier full[1]"
    )
    assert WAIT_LINE in str(error)
    assert made.launches


def test_barriers_of_the_compiler_have_the_line_of_their_loop(page: Any):
    made = register(PROGRAMS["overlap_ag"](), "ag_0_kernel")
    report(page, "ag_0_kernel mbarrier", index=6)
    assert "of the mbarrier mbarrier[6]" in str(phase_reports.failure())
    assert "in T.Pipelined(" in str(phase_reports.failure()) and made.launches


def test_programs_of_one_name_leave_the_line_open(page: Any):
    first, second = (register(phase_programs()[kind], "same_kernel") for kind in ("units", "plain"))
    report(page, "same_kernel full")
    assert (error := phase_reports.failure()) is not None and not error.where
    del second
    assert first.launches


def test_without_a_report_errors_stay_as_they_are(page: Any):
    assert phase_reports.failure() is None
    with pytest.raises(RuntimeError, match="^another$"), phase_reports.checked():
        raise RuntimeError("another")


def test_the_longest_bound_counts(page: Any):
    for wait_s in (3.0, 30.0, 1.0):
        phase_reports.bound_phases(wait_s)
    assert phase_reports._limit_s == 30.0 * PATIENCE


def test_a_module_is_given_its_bound_and_the_address_of_the_report(monkeypatch: pytest.MonkeyPatch, page: Any):
    bindings, state = pytest.importorskip("cuda.bindings.driver"), torch.zeros(2, dtype=torch.int64)
    asked: list[bytes] = []

    def symbol(module: Any, name: bytes) -> tuple[Any, int, int]:
        asked.append(name)
        found = bindings.CUresult.CUDA_SUCCESS if int(module) == 1 else bindings.CUresult.CUDA_ERROR_NOT_FOUND
        return found, state.data_ptr(), 24

    monkeypatch.setattr(bindings, "cuModuleGetGlobal", symbol)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(phase_reports, "past_waits", lambda device: stream)
    move = lambda name, to, source, nbytes, on: ctypes.memmove(to, source, nbytes)  # noqa: E731
    monkeypatch.setattr(phase_reports.driver, "call", move)
    phase_reports.bound_phases(5.0)
    phase_reports._begin(2)
    assert not state.any()
    phase_reports._begin(1)
    assert asked == [STATE] * 2
    assert state.tolist() == [5 * PATIENCE * 10**9, phase_reports._page().data_ptr()]


def test_a_failure_is_printed_at_exit_unless_it_was_raised(monkeypatch: pytest.MonkeyPatch, page: Any):
    printed: list[Any] = []
    monkeypatch.setattr(phase_reports.sys, "excepthook", lambda kind, error, trace: printed.append(error))
    phase_reports._leave()
    report(page, "gemm_kernel mbarrier")
    phase_reports._leave()
    assert [type(error) for error in printed] == [WaitTimeoutError]
    with pytest.raises(WaitTimeoutError), phase_reports.checked():
        raise RuntimeError("CUDA error: unspecified launch failure")
    phase_reports._leave()
    assert len(printed) == 1


def one() -> Any:
    @T.prim_func
    def counted(X: T.Tensor((BLOCKS,), "int32")):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            with T.Scale("block"):
                X[bx] += 1

    return counted


def test_calls_and_synchronization_raise_it_in_place_of_errors_of_cuda(monkeypatch: pytest.MonkeyPatch, page: Any):
    device = Device(monkeypatch)
    own = execute.DeviceProgram(lowered(one(), devices=2).lowered, {}).build()
    values = [torch.zeros(BLOCKS, dtype=torch.int32)]
    device.broken = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        own(values)
    report(page, "counted_0_kernel full")
    with pytest.raises(WaitTimeoutError, match="of the mbarrier full"):
        own(values)

    def fails() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(device.guard, "synchronize", fails, raising=False)
    with pytest.raises(WaitTimeoutError, match="of the mbarrier full"):
        own.synchronize()
