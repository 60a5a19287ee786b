# SPDX-License-Identifier: MIT
"""Waits for phases of mbarriers end, after a report that names the barrier."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
from tests.cuda.host_text import on_host
from tests.cuda.support import source
from tests.cuda.test_golden_text import PROGRAMS
from tests.gpu.never_hang_common import BLOCKS, phase_program
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running import timeouts
from tilescale.backends.cuda.running.diagnosis import ReportContext, error_for
from tilescale.backends.cuda.running.timeouts import HEAD, ROW, WaitFailure, WaitReport, decode
from tilescale.backends.cuda.running.wait_guard import WaitGuard
from tilescale.backends.tilelang.lowering.text_rewrites import bounded_phases
from tilescale.errors import DeadlockError, WaitTimeoutError

TEXT = "".join(map(header, ("memory.cuh", "sync.cuh", "phases.cuh")))
RANK, RANKS, SIZE = 1, 3, HEAD + 3 * ROW
NAME = [int.from_bytes(part, "little") for part in (b"tiles_fu", b"ll")]
REPORT = WaitReport(RANK, WaitFailure.PHASE, 5, (3, 1, 0), 2 * 2 + 1, *NAME)
STUCK = "block (3, 1) of its kernel 5: waited 6 s for a phase of parity 1 of the mbarrier tiles_full[2]"


# -- on the device -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs waits: how often the grid ended, and what is left in the ranks' reports and at the host."""
    library = on_host(TEXT, "host_phases.h", tmp_path_factory.mktemp("phases"))

    def waits(threads: int, attempts: int, *, limit_ns: int, name: str = "tiles_full", has_failed: bool = False) -> Any:
        words = torch.zeros(RANKS * SIZE + ROW, dtype=torch.int64)
        given = ctypes.c_void_p(words.data_ptr()), threads, attempts, 1, ctypes.c_long(limit_ns), has_failed
        ended = library.run(*given, name.encode())
        return ended, [one.tolist() for one in words.split(SIZE)]

    return waits


@pytest.mark.parametrize("attempts", [0, 1, 100])
def test_a_phase_that_completes_leaves_no_report(attempts: int, run: Any):
    ended, (*reports, host) = run(4, attempts, limit_ns=10**10)
    assert ended == 0
    assert not any(map(decode, reports)) and not any(host)


def test_a_phase_that_does_not_complete_ends_the_grid_with_a_report_to_the_host(run: Any):
    ended, (*reports, host) = run(4, -1, limit_ns=2 * 10**7)
    assert ended == 1
    assert not any(map(decode, reports))
    assert host == [RANK + 1, WaitFailure.PHASE, 5, 3 | 1 << 31, 5, *NAME, 0]


@pytest.mark.parametrize("name", ["a", "eight_ok", "mbarrier_more", "sixteen_and_more_characters"])
def test_the_error_has_sixteen_characters_of_a_name(name: str, run: Any):
    _, (*_, host) = run(1, -1, limit_ns=10**6, name=name)
    report = WaitReport(RANK, WaitFailure.PHASE, 5, (3, 1, 0), *host[4:7])
    error = error_for([report], ReportContext("gemm", RANK, (), 3.0, ()))
    assert error.message.endswith(f"of the mbarrier {name[:16]}[2]")


def test_a_grid_whose_rank_has_failed_before_ends_without_another_report(run: Any):
    ended, (*reports, host) = run(1, -1, limit_ns=2 * 10**7, has_failed=True)
    assert ended == 1 and not any(host)
    assert not decode(reports[0])


# -- in texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_wait_of_a_kernel_is_without_bound(name: str):
    text = source(PROGRAMS[name]())
    waits = re.findall(r"\]\.wait\(.*\);", text)
    assert all(re.search(r', wait_limit, \(?.*wait_record.*, \d+, "\w+", .*\);$', wait) for wait in waits)
    assert bool(waits) == (".arrive" in text)
    assert "<Barrier*>" not in text and "tilescale::bound_phases(wait" not in text


def test_barriers_of_users_are_bounded_too():
    text = source(phase_program())
    assert "auto full = reinterpret_cast<tilescale::Bounded<Barrier>*>(full_mem);\n" in text
    assert '  full[1].wait(0, wait_limit, wait_record, 0, "full", 1);\n' in text


def test_the_emulator_finds_the_program_that_hangs():
    args = [[torch.zeros(BLOCKS, dtype=torch.int32), 0] for _ in range(2)]
    tilescale.emulate(phase_program(), args)
    assert all(x.tolist() == [1] * BLOCKS for x, _ in args)
    args[1][1] = 64
    with pytest.raises(DeadlockError):
        tilescale.emulate(phase_program(), args)


def test_a_kernel_without_a_bound_stays_as_it_is():
    mbarriers, wait = "  auto mbarrier = reinterpret_cast<Barrier*>(mem);\n", "  mbarrier[(k & 3)].wait((k >> 2)"
    assert bounded_phases(f"{mbarriers}{wait});\n") == f"{mbarriers}{wait});\n"
    bound = "  tilescale::bound_phases(limit, record, 7);\n"
    made = bounded_phases(f"{bound}{mbarriers}{wait});\n")
    assert made == f"{mbarriers.replace('Barrier', 'tilescale::Bounded<Barrier>')}" + (
        f'{wait}, limit, record, 7, "mbarrier", (k & 3));\n'
    )


# -- on the host -------------------------------------------------------------------------------------------------------


def test_the_error_names_the_barrier():
    scene = ReportContext("gemm", RANK, (), 3.0, ())
    error = error_for([REPORT], scene)
    assert type(error) is WaitTimeoutError and error.message == f"gemm on rank 1, {STUCK}"


def ends(host: torch.Tensor, rank: int) -> Any:
    """An error of CUDA after the end of a grid, with the report in the host's row."""

    def raises(*given: Any) -> None:
        host[1:7] = torch.tensor([WaitFailure.PHASE, 5, 3 | 1 << 31, 5, *NAME])
        host[0] = rank + 1
        raise RuntimeError("CUDA error: unspecified launch failure")

    return raises


def test_a_program_of_several_devices_raises_it_without_asking_the_device():
    guard = WaitGuard.__new__(WaitGuard)
    guard._program, guard.sites, guard._limit_ns, guard._error = "gemm", [], 3 * 10**9, None
    guard._near = guard._group = SimpleNamespace(rank=RANK, ranks=(0, 1, 2), refusal=lambda call: None)
    guard._world = SimpleNamespace(rank=RANK, failure=lambda: None)
    guard.records = SimpleNamespace(ended=REPORT, read=lambda: [REPORT], stopped=True)
    guard._wait_idle = ends(torch.zeros(ROW, dtype=torch.int64), RANK)
    for call in (guard.synchronize, guard.check):
        with pytest.raises(WaitTimeoutError, match="of the mbarrier tiles_full"):
            call()


def test_the_row_of_the_host_is_read_once_it_is_complete():
    records = timeouts.WaitRecords.__new__(timeouts.WaitRecords)
    host = torch.zeros(ROW, dtype=torch.int64)
    records._stopped, records._head = host.numpy().data, [0] * 5 + [RANK]
    assert records.ended is None
    with pytest.raises(RuntimeError):
        ends(host, RANK)()
    assert records.ended == REPORT and records.read() == [REPORT]
    host[1] = WaitFailure.TIMEOUT
    assert records.ended is None
