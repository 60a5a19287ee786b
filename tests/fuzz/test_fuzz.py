# SPDX-License-Identifier: MIT
"""Random programs without a GPU: the emulator accepts them in every order, what they lower to compiles, and the
generator is the same everywhere. tests/gpu/fuzz_check.py runs hundreds of them on GPUs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tilelang
import torch

from tests.cuda.support import apart, lowered
from tests.fuzz.generator import generate
from tests.fuzz.program import Fuzzed, Line, smaller
from tests.fuzz.skew import skewed
from tilescale.errors import TileScaleError

PROGRAMS = [(1, seed) for seed in range(6)] + [(2, seed) for seed in range(2)]
MACHINE = "h200-sxm-8"


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    """Whether all devices have the same in all tensors."""
    return all(
        torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("devices", "seed"), PROGRAMS)
def test_every_order_of_units_computes_the_same(devices: int, seed: int):
    program = generate(seed, devices)
    assert program == generate(seed, devices)
    if not program.is_accepted():
        pytest.skip("the emulator refuses it")
    expected = program.emulated()
    for order in (0, 1):
        assert same(program.emulated(schedule_seed=order), expected)


def texts() -> list[str]:
    """The texts of those that are supported on GPUs."""
    found = []
    for devices, seed in PROGRAMS:
        try:
            found.append(lowered(generate(seed, devices).trace(), MACHINE).source({}))
        except TileScaleError as error:
            assert error.where
    return found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_they_lower_to_compiles_with_delays(tmp_path: Path):
    made = [skewed(apart(text, number)) for number, text in enumerate(texts())]
    assert len(made) > len(PROGRAMS) // 2
    assert all("fuzz_delay(" in text for text in made)
    joined = "\n".join(re.sub(r"\bfuzz_delay\b", f"fuzz_delay{number}", text) for number, text in enumerate(made))
    source = tmp_path / "texts.cu"
    source.write_text(joined, encoding="utf-8")
    root = Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "--ptx", *includes, "-o", str(tmp_path / "texts.ptx"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if ": error" in line][:20]


def test_a_program_that_fails_is_made_smaller():
    program = generate(1)
    marked = Fuzzed(program.seed, 1, program.parameters, (*program.body, Line("pass")))
    small = smaller(marked, lambda candidate: any(line.text == "pass" for line in candidate.body))
    assert [line.text for line in small.body] == ["pass"] or len(small.source) < len(marked.source) / 2
