# SPDX-License-Identifier: MIT
"""Tests do not depend on the shell that starts them, and each of their processes uses one CPU core."""

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import warm
from tests.order import dealt
from tests.shared_texts import SharedTexts

for _name in [name for name in os.environ if name.startswith("TILESCALE_")]:
    del os.environ[_name]

if "PYTEST_XDIST_WORKER" not in os.environ:
    _shared = tempfile.TemporaryDirectory(prefix="tilescale-run-")
    os.environ["TESTS_SHARED"] = _shared.name  # all workers of this process have it

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: tests run side by side, and idle threads of OpenMP spin

# Before inductor is loaded: its scalar kernels, without the vectors' headers, compile in a fifth of the time.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"

gc.disable()  # up to the end of the collection: almost all that is imported and traced stays

# The same examples in every run, and no limit to the time of one, as machines may be busy.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")
    parser.addoption("--lower", choices=["sample", "all"], help="lower programs that tests emulate to CUDA, too")


def pytest_configure(config: pytest.Config) -> None:
    """Measurements and tunings end with the process."""
    kept = tempfile.TemporaryDirectory(prefix="tilescale-tests-")
    os.environ["TILESCALE_CACHE_DIR"] = kept.name
    config.add_cleanup(kept.cleanup)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from one process that has loaded all tests."""
    for spec in specs:
        spec.python = warm.worker(config.args)


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than CPU cores: tests of jobs mostly wait for the processes that they start."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow tests, so that none of them is the last to run."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    items[:] = dealt(slow, others, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def pytest_collection_finish():
    """Modules and tests stay to the end: the garbage collector need not look at them again and again."""
    if "tilelang_core.compile" in sys.modules:
        sys.modules["tilelang_core.compile"]._generated = SharedTexts(Path(os.environ["TESTS_SHARED"]))
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 10, 10)
    gc.enable()


def pytest_sessionfinish():
    """Spare pytest its five collections of garbage at the end, which take seconds of each worker."""
    gc.freeze()


@pytest.fixture
def remedies() -> None:
    """For tests of the exact remedies in errors' hints: programs with a mistake are run again to find them."""


@pytest.fixture(autouse=True)
def _without_remedies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests do without that search, which takes longer than to find the mistake."""
    emulate = sys.modules.get("tilescale.backends.emulator.emulate")
    if emulate is not None and "remedies" not in request.fixturenames:
        monkeypatch.setattr(emulate, "advise", lambda *given: None)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """A report in a form that can be sent to the process that prints it: pytest-xdist cannot send TVM's strings."""
    return plain((yield))


def plain(data: Any) -> Any:
    """Data of lists, tuples and dictionaries with Python's own strings."""
    if isinstance(data, dict):
        return {plain(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(plain, data))
    return str.__str__(data) if isinstance(data, str) and type(data) is not str else data
