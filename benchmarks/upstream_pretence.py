# SPDX-License-Identifier: MIT
"""Run TileLang's examples and tests through TileScale on a computer without a GPU.

Importing this module patches the running process: `tilelang.jit`, `tilelang.compile` and `tilelang.language` are
TileScale's, and CUDA tensors are CPU tensors. It is a plugin of pytest (`-p upstream_pretence`), which appends a record
for each test to the file `UPSTREAM_RECORDS`: outcome, seconds, and for each kernel whether its CUDA text is stock's.
`upstream_examples.py` starts these processes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tilelang
import tilelang.profiler as profiler
import torch
from tilelang.backend.target import determine_target
from tilelang.contrib import nvcc
from torch.overrides import TorchFunctionMode
from tvm.ir.transform import PassContext

import tilescale
import tilescale.language
from tilelang_core.compile import cuda_source
from tilescale.runtime import kernel as bound
from tilescale.runtime.profiler import SimulatedProfiler

MACHINES = {"8.0": "a100-sxm-8", "8.9": "rtx4090-pcie-2", "9.0": "h200-sxm-8", "10.0": "b200-sxm-8"}
ARCH = os.environ.get("UPSTREAM_ARCH", "9.0")
TEST_S = int(os.environ.get("UPSTREAM_TEST_S", "40"))
NOT_HARDWARE = ("Run-time support", "Compile-time support", "No device exists", "tests disabled")


class OnCpu(TorchFunctionMode):
    """Replace CUDA devices in calls of torch by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch._scaled_mm:
            return _scaled_mm(*args, **kwargs)
        return func(*(_cpu(value) for value in args), **kwargs)


def _scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
    """PyTorch's GEMM of float8 operands, which on a CPU takes 40 ms for 128 x 128 x 128."""
    return (a.float() * scale_a @ (b.float() * scale_b)).to(out_dtype)


def _cpu(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class Names(types.ModuleType):
    """Put TileScale's names into `tilelang`. TileLang's modules, and the seam to it, keep the original."""

    __path__, __version__, __file__ = tilelang.__path__, tilelang.__version__, tilelang.__file__
    jit, compile, language = staticmethod(tilescale.jit), staticmethod(tilescale.compile), tilescale.language

    def __getattr__(self, name: str) -> Any:
        return getattr(tilelang, name)


class Nothing(types.ModuleType):
    """Stand-in for a missing library that examples import for contenders: all its names and calls are itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getitem__(self, index: Any) -> Any:
        return self


class TooLong(BaseException):
    """A test exceeds its time limit."""


made: list[bound.Kernel] = []
"""Kernels that the current test has built."""


def pretend() -> None:
    """Replace TileLang's names by TileScale's, and CUDA by the CPU."""
    OnCpu().__enter__()
    major, minor = (int(part) for part in ARCH.split("."))
    properties = type("Properties", (), {"major": major, "minor": minor, "multi_processor_count": 132, "name": "GPU"})
    if importlib.util.find_spec("triton") is None:
        names = ("triton", "triton.language", "triton.language.extra", "triton.runtime", "triton.testing")
        sys.modules.update((name, Nothing(name)) for name in names)
    torch.compile = lambda function=None, **options: function if function is not None else lambda given: given
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *given: (major, minor)
    cuda.get_device_name = lambda *given: "GPU"
    cuda.get_device_properties = lambda *given: properties()
    cuda.synchronize = cuda.set_device = cuda.manual_seed = cuda.manual_seed_all = lambda *given: None
    cuda.empty_cache = cuda.init = cuda.synchronize
    nvcc.get_target_compute_version = lambda *given: ARCH
    importlib.import_module("tilelang.language.fp8")  # which files import by this name
    sys.modules["tilelang"] = Names("tilelang")
    sys.modules["tilelang.language"] = tilescale.language
    profiler.do_bench = lambda *given, **options: 1.0  # nothing here measures times
    SimulatedProfiler.do_bench = lambda *given, **options: 1.0
    first = bound.Kernel.__init__

    def noted(self: Any, *given: Any, **options: Any) -> None:
        first(self, *given, **options)
        made.append(self)

    bound.Kernel.__init__ = noted


def pytest_configure() -> None:
    """Patch before collection, as examples look for a GPU when they are loaded."""
    pretend()


# -- texts -------------------------------------------------------------------------------------------------------------


def compared(kernel: bound.Kernel) -> dict[str, Any]:
    """Whether the text of a kernel equals stock's, and the time of each."""
    begin = time.monotonic()
    stock, refusal = _text(lambda: _of_stock(kernel))
    middle = time.monotonic()
    ours, error = _text(lambda: cuda_source(kernel.ir, kernel.target, kernel.pass_configs))
    end = time.monotonic()
    verdict = "equal" if stock == ours else "differs"
    if verdict == "differs" and any(_text(lambda: _of_stock(kernel))[0] != stock for _ in range(2)):
        verdict = "stock varies"
    if refusal:
        verdict = "stock refuses" if error else "stock refuses, we do not"
    elif error:
        verdict = "we refuse"
    found = {"kernel": kernel.program.name, "text": verdict, "stock_s": middle - begin, "ours_s": end - middle}
    if verdict == "differs" and (folder := os.environ.get("UPSTREAM_TEXTS")):
        name = f"{folder}/{kernel.program.name}-{abs(hash(stock)) % 10000}"
        for end, text in (("stock", stock), ("ours", ours)):
            with open(f"{name}.{end}.cu", "w", encoding="utf-8") as file:
                file.write(text or "")
        found["file"] = name
    return found | {"error": error or refusal} if error or refusal else found


def _text(make: Any) -> tuple[str | None, str | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - any error of TVM
        return None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:300]}"


def _of_stock(kernel: bound.Kernel) -> str:
    target = determine_target(kernel.target, return_object=True)
    own = kernel.ir.attrs.get("tilelang_pass_configs") if kernel.ir.attrs else None
    config = {**dict(own or {}), **kernel.pass_configs}
    with PassContext(opt_level=3, config=config), target:
        return str(tilelang.lower(kernel.ir, target=target).kernel_source)


# -- pytest ------------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that want a GPU; those of other architectures stay skipped."""
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [m for m in node.own_markers if not _is_for_hardware(m)]


def _is_for_hardware(mark: pytest.Mark) -> bool:
    return mark.name == "skipif" and any(part in str(mark.kwargs.get("reason")) for part in NOT_HARDWARE)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def ended(*given: Any) -> None:
        raise TooLong(f"over {TEST_S} s")

    signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, TEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test, then compare the texts of its kernels."""
    made.clear()
    begin, outcome, detail = time.process_time(), "passed", ""
    try:
        with use(), _bounded():
            return (yield)
    except BaseException as error:
        outcome = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
        outcome = "too long" if isinstance(error, TooLong) else outcome
        detail = f"{type(error).__name__}: {str(error)[:1500]}"
        if isinstance(error, TooLong):
            pytest.fail(str(error))
        raise
    finally:
        seconds = time.process_time() - begin
        record(item.nodeid, outcome, detail, seconds, [compared(kernel) for kernel in made[:8]])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record tests before they run, as a file may reach its limit first."""
    for item in session.items:
        record(item.nodeid, "not begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test that is skipped, or fails, before it runs."""
    if report.when == "setup" and not report.passed:
        record(report.nodeid, report.outcome, _reason(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be loaded."""
    if not report.passed:
        record(report.nodeid, "not loaded", _reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr
    return str(reason[2]) if isinstance(reason, tuple) else str(reason).strip().splitlines()[-1]


def record(test: str, outcome: str, detail: str = "", seconds: float = 0.0, texts: Any = ()) -> None:
    """Append a test's result to the records; the last one counts."""
    row = {"test": test, "outcome": outcome, "seconds": round(seconds, 2), "detail": detail, "texts": list(texts)}
    with open(os.environ["UPSTREAM_RECORDS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def use() -> Any:
    """Machine of the architecture that tests find."""
    return tilescale.use_machine(MACHINES[ARCH])
