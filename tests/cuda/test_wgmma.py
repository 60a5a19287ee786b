# SPDX-License-Identifier: MIT
"""GEMMs of warpgroups: a text defines the instructions that it calls, as TileLang's header does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tilelang

from tests.cuda.support import source
from tests.language import programs as reference
from tilescale.backends.tilelang.lowering.text_rewrites import called_wgmmas, fence_own_sums, without_wgmma_shapes

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


INTRIN = "#include <tl_templates/cuda/intrin.h>\n"
OWN = "#define TILESCALE_WGMMA\n"
SYNCHRONIZED = INTRIN + """#include <tl_templates/cuda/barrier.h>
extern "C" __global__ void synchronized(uint64_t a, uint64_t b, float* out) {
  float c[8];
  for (int i = 0; i < 8; ++i) c[i] = out[i];
  tl::warpgroup_fence_operand(reinterpret_cast<float*>(c + 0), 16);
  tl::warpgroup_arrive();
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;}" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]),
      "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) : "l"(a), "l"(b));
  tl::warpgroup_commit_batch();
  tl::warpgroup_wait<1>();
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(reinterpret_cast<float*>(c + 0), 16);
  if (tl::tl_shuffle_elect<64>()) for (int i = 0; i < 8; ++i) out[i] = c[i];
}
"""


def test_synchronization_is_defined_without_the_header_of_all_shapes():
    text = source(reference.tensor_parallel_gemm(4, 128, 128, 512))
    assert text.count(OWN) == text.count(INTRIN) == 1 and text.index(OWN) < text.index(INTRIN)
    assert without_wgmma_shapes(text) == text


@pytest.mark.parametrize(
    "other",
    [
        HEADER + SYNCHRONIZED,
        "#include <tl_templates/cuda/gemm.h>\n" + SYNCHRONIZED,
        SYNCHRONIZED + "// cute::SM90::GMMA",
        SYNCHRONIZED.replace(INTRIN, ""),
    ],
)
def test_texts_that_may_need_all_shapes_keep_their_header(other: str):
    assert without_wgmma_shapes(other) == other


FENCE = "  float c[64];\n  tl::warpgroup_fence_operand(reinterpret_cast<{type}*>({name} + {offset}), {count});\n"


@pytest.mark.parametrize(("offset", "count", "fenced"), [(0, 128, 64), (0, 64, 64), (32, 128, 32), (32, 16, 16)])
def test_registers_of_the_thread_are_fenced(offset: int, count: int, fenced: int):
    text = FENCE.format(type="float", name="c", offset=offset, count="{}")
    assert fence_own_sums(text.format(count)) == text.format(fenced)


@pytest.mark.parametrize(("kind", "name"), [("uint32_t", "c"), ("float", "other")])
def test_fences_of_other_arrays_stay(kind: str, name: str):
    text = FENCE.format(type=kind, name=name, offset=0, count=128)
    assert fence_own_sums(text) == text


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_texts_of_several_grids_are_one_file(tmp_path: Path):
    text = without_wgmma_shapes(SYNCHRONIZED)
    _compile(text + text.replace("void synchronized", "void again"), tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    ("text", "rewrite"),
    [
        (KERNEL.format(calls=BFLOAT16 + FLOAT8), called_wgmmas),
        (SYNCHRONIZED, without_wgmma_shapes),
        (SYNCHRONIZED, fence_own_sums),
    ],
)
def test_the_binary_is_the_same(text: str, rewrite: Callable[[str], str], tmp_path: Path):
    assert rewrite(text) != text
    assert _compile(text, tmp_path / "header") == _compile(rewrite(text), tmp_path / "own")


def _compile(text: str, folder: Path) -> bytes:
    """The binary of a text. It depends on the file's name."""
    root = Path(tilelang.__file__).parent
    folder.mkdir(exist_ok=True)
    (folder / "text.cu").write_text(text, encoding="utf-8")
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    command = ["nvcc", "--cubin", "-arch=sm_90a", "-std=c++20", "-w", *includes, "text.cu", "-o", "text.cubin"]
    subprocess.run(command, cwd=folder, check=True, timeout=240)
    return (folder / "text.cubin").read_bytes()
