# SPDX-License-Identifier: MIT
"""The script that times two examples on GPUs: its programs, its checks before, and its results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

import tilescale

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "white_paper.py"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with another results folder, and a clock that measures 10 microseconds for each call."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("white_paper", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "white_paper", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "microseconds", lambda call: (call(), 10.0)[1])
    return module


def test_both_programs_are_checked_and_counted(script: ModuleType):
    gemm = script.measure(script.product(256, CPU))
    assert (gemm.gpus, gemm.us, gemm.alone_us) == (1, 10.0, None)
    assert gemm.tflops == round(2 * 256**3 / 10e-6 / 1e12, 1)
    mla = script.measure(script.decode(2, 64, 256, CPU))
    assert mla.tflops == round(2 * 2 * 64 * 256 * (512 + 512 + 64) / 10e-6 / 1e12, 1)
    assert mla.gb_s == round(2 * 2 * 256 * (512 + 64) / 10e-6 / 1e9, 1)


def test_a_wrong_result_has_no_time(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    work = script.product(256, CPU)

    def spoilt(seed: int) -> tuple:
        (a, b, c), check = work.fresh(seed)
        return [a * (1 + seed / 64), b, c], check  # right for the first seed only

    monkeypatch.setattr(script, "microseconds", lambda call: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"\d+ of 65536 elements are wrong"):
        script.measure(script.Work(work.name, work.program, spoilt, work.flops, work.bytes))


def test_times_of_one_gpu_stand_beside_those_of_several(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    lines = [{"name": "GEMM", "us": 40.0}]
    (script.RESULTS / "white_paper_1.json").write_text(json.dumps({"measurements": lines}), encoding="utf-8")
    assert script._alone("GEMM") is None  # here is one rank
    world = tilescale.init()
    monkeypatch.setattr(script.tilescale, "init", lambda: type("World", (), {"size": 2, "rank": world.rank}))
    assert script._alone("GEMM") == 40.0 and script._alone("another size") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script: ModuleType):
    result = CliRunner().invoke(script.main)
    assert result.exit_code == 2 and "times need GPUs" in result.output
