# SPDX-License-Identifier: MIT
"""Text for AMD GPUs: the programs that have one, its parts, and its compilation."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.cuda.support import example_programs
from tilelang_core import compile as stock
from tilescale.errors import TileScaleError, UnsupportedError
from tilescale.hda.current import use_machine

MACHINE = "mi300x-8"
WITHOUT = {
    "08_tp_gemm": "no level 'warpgroup'",
    "09_cp_flash_mla": "'l1' .* has 64 KiB",
    "10_cluster_gemm": "no level 'cta_cluster'",
    "11_roles": "no level 'warpgroup'",
    "12_sender_role": "no level 'warpgroup'",
    "13_ring_attention": "no level 'warpgroup'",
}
"""Examples with units or memory of other machines, and the text of the error."""
OFTEN = ["01_neighbour_shift", "05_all_to_all", "06_ag_gemm"]
"""Examples whose text is generated at each run of the tests; by night all."""
COMPILER = shlex.split(os.environ.get("HIPCC", ""))
"""A compiler of HIP with its options, such as `hipcc --offload-arch=gfx942`."""
NAMES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in example_programs()]

Row = T.Tensor((64,), "float32")


def texts(name: str) -> list[str]:
    with use_machine(MACHINE):
        return [str(tilescale.compile(func).source) for func in example_programs()[name]()]


def put(op: Any, threads: int = 64) -> Any:
    """A program that sends a row, and then does something with a flag and the row."""

    @T.prim_func
    def program(X: Row, inbox: Row, Z: Row):
        with T.Kernel(device=4, block=1, threads=threads), T.Scale("block"), T.Scale("device") as (rank, size):
            arrived = T.alloc_flags((1,))
            T.copy(X, inbox, dst=(rank + 1) % size, signal=arrived[0])
            op(arrived, inbox, Z)

    return program


@T.macro
def waits(arrived, inbox, Z):
    T.wait(arrived[0], ">=", 1)
    T.copy(inbox, Z)


@T.macro
def waits_by_wavefront(arrived, inbox, Z):
    with T.Scale("wavefront"):
        T.wait(arrived[0], ">=", 1)
        T.copy(inbox, Z)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_text_or_an_error_with_the_reason(name: str):
    if name in WITHOUT:
        with pytest.raises(TileScaleError, match=WITHOUT[name]):
            texts(name)
        return
    made = [text for text in texts(name) if text]  # collectives of whole tensors alone need none
    assert made
    for text in made:
        assert "#include <hip/hip_runtime.h>" in text
        assert not re.search(r"\basm volatile|__nanosleep|\btl::tma|#include <tl_templates/cuda", text)
        called = set(re.findall(r"tilescale::(\w+)[<(]", text[text.index('extern "C"') :]))
        assert all(re.search(rf"__device__ .*\b{function}\(", text) for function in called)


@pytest.mark.skipif(not COMPILER, reason="HIPCC names no compiler of HIP, with its options")
@pytest.mark.parametrize("name", [name for name in example_programs() if name not in WITHOUT])
def test_a_compiler_accepts_the_text(name: str, tmp_path: Path):
    templates = Path(stock.tilelang.__file__).parent / "src"
    for number, text in enumerate(texts(name)):
        source = tmp_path / f"{number}.hip"
        source.write_text(text, encoding="utf-8")
        command = [*COMPILER, "-x", "hip", "-std=c++17", "-O2", f"-I{templates}", "-S", "-o", str(tmp_path / "out.s")]
        subprocess.run([*command, str(source)], check=True, timeout=300)


def test_a_signal_follows_the_stores_and_a_wait_precedes_the_loads():
    text = str(tilescale.compile(put(waits), machine=MACHINE).source)
    kernel = text[text.index('extern "C"') :]
    order = ["inbox_peers[(", "complete_stores", "__syncthreads", "signal<", "wait<", "__syncthreads", "= inbox["]
    assert re.search(".*".join(map(re.escape, order)), kernel, re.DOTALL)
    assert "__hip_atomic_fetch_add(p, v, __ATOMIC_RELEASE, S)" in text
    assert "SYSTEM = __HIP_MEMORY_SCOPE_SYSTEM" in text


def test_plain_tilelang_has_stock_text():
    @T.prim_func
    def program(X: Row, Z: Row):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                Z[i] = X[i] + 1

    text = str(tilescale.compile(program, machine=MACHINE).source)
    assert "#include <hip/hip_runtime.h>" in text and "tilescale" not in text


def test_units_inside_a_program_are_refused_at_their_line():
    with use_machine(MACHINE), pytest.raises(UnsupportedError, match="inside a program has no HIP lowering") as found:
        print(tilescale.compile(put(waits_by_wavefront, threads=128)).source)
    assert found.value.where[0].file.endswith("test_text.py")


def test_nothing_runs():
    """A program for such a machine is emulated on a host without it."""
    kernel = tilescale.compile(put(waits), machine=MACHINE)
    assert str(kernel.device) == "cpu"
