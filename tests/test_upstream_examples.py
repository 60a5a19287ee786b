# SPDX-License-Identifier: MIT
"""TileLang's examples through TileScale's names: outcomes of tests are recorded, as rows of the page's table."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

EXAMPLE = '''
import pytest
import tilelang
import tilelang.language as T
import torch

@tilelang.jit(out_idx=[-1])
def doubled(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=n):
            for i in T.Parallel(n):
                Y[i] = 2 * X[i]
    return main

def test_doubled():
    x = torch.randn(64, device="cuda")
    assert torch.equal(doubled(64)(x), 2 * x)

@pytest.mark.skip("not here")
def test_skipped():
    pass

def test_wrong():
    assert torch.equal(doubled(32)(torch.ones(32).cuda()), torch.ones(32).cuda())
'''


def script() -> Any:
    spec = importlib.util.spec_from_file_location("upstream_examples", BENCHMARKS / "upstream_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_an_example_is_run_and_its_text_compared(tmp_path: Path):
    examples = script()
    path = tmp_path / "examples" / "double" / "test_double.py"
    path.parent.mkdir(parents=True)
    path.write_text(EXAMPLE)
    assert list(examples.files(tmp_path, "double")) == [path]
    results: dict[str, Any] = {"tests": {}}
    for record in examples.run(path, tmp_path, "9.0", 100):
        examples.kept(results, record)
    assert json.loads(json.dumps(results)) == results
    right, wrong = (results["tests"][f"examples/double/test_double.py::test_{name}"] for name in ("doubled", "wrong"))
    assert right["texts"] == wrong["texts"] == {"equal": 1}
    assert (right["outcome"], wrong["outcome"]) == ("passed", "failed")
    skipped = results["tests"]["examples/double/test_double.py::test_skipped"]
    assert examples.reason(skipped) == "left out by the test itself"
    lines = examples.examples_table(results["tests"]).splitlines()
    assert lines[2].startswith("| double | doubled | 1 | equal | right | ")
    assert lines[-1].startswith("| double | wrong | 1 | equal | AssertionError | ")
    assert "| result: right | 1 |  |" in examples.summary_table(results["tests"]).splitlines()


def test_the_pages_have_the_results():
    examples = script()
    tests = json.loads(examples.RESULTS.read_text(encoding="utf-8"))["tests"]
    assert all(page.read_text(encoding="utf-8") == text for page, text in examples.pages(tests).items())
