# SPDX-License-Identifier: MIT
"""GEMMs of warpgroups: a text defines the instructions that it calls, as TileLang's header does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tilelang

from tests.cuda.support import source
from tests.language import programs as reference
from tilescale.backends.tilelang.lowering.text_rewrites import called_wgmmas

HEADER = "#include <tl_templates/cuda/instruction/wgmma.h>\n"
KINDS = "tl::DataType::{a}, tl::DataType::{a}, tl::DataType::{c}"
CALL = f"tl::wgmma_ss<{KINDS}, 64, {{n}}, {{k}}, false, {{t}}, 1, -1>(a, b, c, p);"
BFLOAT16 = CALL.format(a="kBFloat16", c="kFloat32", n=16, k=16, t="true")
FLOAT8 = CALL.format(a="kFloat8_e4m3", c="kFloat32", n=24, k=32, t="false")
KERNEL = """#include <tl_templates/cuda/instruction/wgmma.h>
extern "C" __global__ void many(uint64_t a, uint64_t b, uint32_t* out, bool p) {{
  uint32_t c[12];
  for (int i = 0; i < 12; ++i) c[i] = out[i];
  {calls}
  for (int i = 0; i < 12; ++i) out[i] = c[i];
}}
"""


def test_each_called_shape_is_defined_once():
    text = called_wgmmas(KERNEL.format(calls=BFLOAT16 + BFLOAT16 + FLOAT8))
    assert called_wgmmas(text) == text
    assert HEADER not in text and text.count("template <>") == 2
    assert "m64n16k16.f32.bf16.bf16" in text and "m64n24k32.f32.e4m3.e4m3" in text


@pytest.mark.parametrize(
    "other",
    [
        CALL.format(a="kBFloat16", c="kFloat16", n=16, k=16, t="true"),
        CALL.format(a="kInt8", c="kFloat32", n=16, k=32, t="false"),
        BFLOAT16.replace("_ss", "_rs"),
    ],
)
def test_texts_with_other_calls_keep_the_header(other: str):
    text = KERNEL.format(calls=BFLOAT16 + other)
    assert called_wgmmas(text) == text


def test_texts_of_programs_include_no_header():
    text = source(reference.tensor_parallel_gemm(4, 128, 128, 512))
    assert "tilescale::wgmma_ss" in text and HEADER not in text


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_binary_is_the_same(tmp_path: Path):
    text, root = KERNEL.format(calls=BFLOAT16 + FLOAT8), Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    for name, given in (("header", text), ("own", called_wgmmas(text))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.cu").write_text(given, encoding="utf-8")
        command = ["nvcc", "--cubin", "-arch=sm_90a", "-std=c++20", "-w", *includes, "text.cu", "-o", "text.cubin"]
        subprocess.run(command, cwd=tmp_path / name, check=True, timeout=240)
    assert (tmp_path / "header/text.cubin").read_bytes() == (tmp_path / "own/text.cubin").read_bytes()
