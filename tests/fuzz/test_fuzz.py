# SPDX-License-Identifier: MIT
"""Random programs without a GPU: the emulator accepts them in every order, what they lower to compiles, and the
generator is the same everywhere. tests/gpu/fuzz_check.py runs hundreds of them on GPUs."""

import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tilelang
import torch

import tilescale
from tests.cuda.support import lowered
from tests.fuzz.compiler import SharedCompiler, compile_at
from tests.fuzz.generator import generate
from tests.fuzz.program import Fuzzed, Line, smaller
from tests.fuzz.skew import skewed
from tests.fuzz.together import by_headers, joined, kernels
from tilescale.errors import InternalError, TileScaleError

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


@pytest.mark.parametrize(
    ("devices", "seed"),
    [(1, 3), (1, 114), (2, 1), *(pytest.param(1, seed, marks=pytest.mark.nightly) for seed in range(200, 260))],
)
def test_compile_ends_with_text_or_an_error_of_ours(devices: int, seed: int):
    try:
        tilescale.compile(generate(seed, devices).trace(), machine=MACHINE).source  # noqa: B018 - lowered when asked for
    except TileScaleError as error:
        assert error.where and not isinstance(error, InternalError)


def texts() -> list[list[str]]:
    """The texts of the kernels of those that are supported on GPUs."""
    found = []
    for devices, seed in PROGRAMS:
        try:
            found.append(lowered(generate(seed, devices).trace(), MACHINE).texts({}))
        except TileScaleError as error:
            assert error.where
    return found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_they_lower_to_compiles_with_delays(tmp_path: Path):
    programs = texts()
    assert len(programs) > len(PROGRAMS) // 2
    made = [skewed(text) for each in programs for text in each]
    assert all("fuzz_delay_" in text for text in made)
    source, root = tmp_path / "texts.cu", Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "--ptx", *includes, "-o", str(tmp_path / "texts.ptx"), str(source)]
    for alike in by_headers(made):
        source.write_text(joined(alike), encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, [line for line in done.stderr.splitlines() if ": error" in line][:20]


def test_a_program_that_fails_is_made_smaller():
    program = generate(1)
    marked = Fuzzed(program.seed, 1, program.parameters, (*program.body, Line("pass")))
    small = smaller(marked, lambda candidate: any(line.text == "pass" for line in candidate.body))
    assert [line.text for line in small.body] == ["pass"] or len(small.source) < len(marked.source) / 2


def kernel_text(name: str) -> str:
    array = "extern __shared__ __align__(1024) uchar buffer[];"
    return f'extern "C" __global__ void {name}_kernel(float* X) {{\n  {array}\n  X[0] = buffer[0];\n}}\n'


def compiled(tmp_path: Path, texts: list[str]) -> tuple[list[bytes | str], list[str]]:
    """Each text's binary, or error, of processes that ask at the same time, and the files that were compiled."""
    files: list[str] = []
    begun, others_wait = threading.Event(), threading.Event()

    def compile_text(text: str, options: object) -> bytes:
        assert options == "-O1"
        if "first_kernel" in text:
            begun.set()
            others_wait.wait(10)
        files.append(text)
        if "wrong" in text:
            raise RuntimeError("no such function: wrong")
        return f"binary {len(files)}".encode()

    def ask(text: str) -> bytes | str:
        try:
            return compile_at(compiler.address)(text, "-O1")
        except RuntimeError as error:
            return str(error)

    compiler = SharedCompiler(str(tmp_path / "compiler"), compile_text, slots=1)
    with ThreadPoolExecutor(len(texts) + 1) as pool:
        first = pool.submit(ask, kernel_text("first"))
        begun.wait(10)
        asked = [pool.submit(ask, text) for text in texts]
        while compiler.jobs < 1 + len(set(texts)):
            time.sleep(0.001)
        others_wait.set()
        assert first.result() == b"binary 1"
        return [one.result() for one in asked], files[1:]


def test_texts_that_wait_are_compiled_together_and_equal_ones_once(tmp_path: Path):
    a, b = kernel_text("a"), kernel_text("b")
    binaries, files = compiled(tmp_path, [a, b, a])
    assert binaries == [b"binary 2"] * 3
    assert len(files) == 1
    assert kernels(files[0]) == {"a_kernel", "b_kernel"}
    assert re.findall(r"uchar (\w+)\[", files[0]) == ["shared_0", "shared_1"]


def test_kernels_of_one_name_are_compiled_apart(tmp_path: Path):
    a, other = kernel_text("a"), kernel_text("a").replace("X[0]", "X[1]")
    binaries, files = compiled(tmp_path, [a, other])
    assert len(files) == len(set(binaries)) == 2


def test_a_text_that_does_not_compile_is_told_alone(tmp_path: Path):
    binaries, files = compiled(tmp_path, [kernel_text("a"), kernel_text("wrong"), kernel_text("b")])
    assert [binary if isinstance(binary, str) else "" for binary in binaries] == ["", "no such function: wrong", ""]
    assert len(files) == 4
