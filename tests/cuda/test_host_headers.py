# SPDX-License-Identifier: MIT
"""Texts without headers of host code: nvcc compiles them to the same instructions."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import tilelang

from tests.cuda.support import source
from tests.language import programs as reference
from tilescale.alarm import raise_after
from tilescale.backends.tilelang.lowering.text_rewrites import without_host_headers

SCANS = "#include <tl_templates/cuda/scan.h>\n"
FIRST = "#define _GLIBCXX_ALGORITHM 1\n"
KERNEL = """#include <cuda.h>
#include <tl_templates/cuda/common.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/cluster.h>
#include <tl_templates/cuda/cuda_fp8.h>
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/reduce.h>
#include <tl_templates/cuda/scan.h>
#include <tl_templates/cuda/ldsm.h>
#include <tl_templates/cuda/threadblock_swizzle.h>
#include <tl_templates/cuda/debug.h>
extern "C" __global__ void __launch_bounds__(128) summed(float* out, bfloat16_t* in, int n) {
  float found = float(in[threadIdx.x]);
  found = tl::AllReduce<tl::SumOp, 128, 1, 0, tl::NamedBarrier<128>>::run(found, (float*)out);
  if (tl::tl_shuffle_elect<128>()) out[n] = exp2f(found);
}
"""


def test_texts_of_programs_read_neither_them_nor_scans():
    text = source(reference.tensor_parallel_gemm(4, 128, 128, 512))
    assert text.count(FIRST) == 1 and SCANS not in text
    assert text.index(FIRST) < text.index("#include <tl_templates/") < text.index("#pragma pop_macro")
    assert without_host_headers(text) == text


def test_later_headers_find_the_library_under_any_condition():
    condition = "#ifdef ENABLE_BF16\n#include <tl_templates/cuda/cuda_bf16_fallbacks.cuh>\n#endif\n"
    text = without_host_headers(KERNEL.replace('extern "C"', condition + 'extern "C"'))
    assert "#pragma pop_macro" in text.partition(condition)[2]


def test_scans_that_are_called_are_included():
    assert SCANS in without_host_headers(KERNEL.replace("exp2f(", "tl::CumSum1D<128>::run("))


@pytest.mark.parametrize(
    "other",
    [
        "#include <tl_templates/cuda/atomic.h>\n" + KERNEL,
        KERNEL + "#include <algorithm>\n",
        KERNEL.replace("exp2f", "std::exp2"),
        KERNEL.replace("tl_templates/cuda", "tl_templates/hip"),
    ],
)
def test_texts_with_other_headers_or_names_of_the_library_are_kept(other: str):
    assert without_host_headers(other) == other


def test_long_texts_take_no_longer_in_proportion():
    with raise_after(20, AssertionError("a search for each character")):
        assert without_host_headers(KERNEL + "// a comment\n" * 50_000).count(FIRST) == 1


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_instructions_are_the_same(tmp_path: Path):
    text, root = KERNEL.replace(SCANS, ""), Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    for name, given in (
        ("all", text),
        ("without", without_host_headers(text) + "#include <functional>\n#include <vector>\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.cu").write_text(given, encoding="utf-8")
        command = ["nvcc", "--cubin", "-arch=sm_90a", "-std=c++20", "-w", *includes, "text.cu", "-o", "text.cubin"]
        subprocess.run(command, cwd=tmp_path / name, check=True, timeout=240)
    found = [_section(tmp_path / name / "text.cubin", ".text.summed") for name in ("all", "without")]
    assert found[0] == found[1] and len(found[0]) > 128


def _section(path: Path, name: str) -> bytes:
    """The content of a section of a file in ELF."""
    data = path.read_bytes()
    (start,), (number, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HH", data, 0x3C)
    table = [struct.unpack_from("<IIQQQQ", data, start + 64 * i) for i in range(number)]
    for at, _, _, _, offset, size in table:
        if data[table[names][4] + at :].startswith(name.encode() + b"\0"):
            return data[offset : offset + size]
    raise AssertionError(f"no section {name}")
