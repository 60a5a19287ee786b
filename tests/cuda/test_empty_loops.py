# SPDX-License-Identifier: MIT
"""What TileLang waits for inside a loop is waited for however often the loop is gone through."""

import re
from typing import Any

import pytest
import tilelang
from tilelang.backend.target import determine_target

import tilescale.language as T
from tilelang_core.compile import generate
from tilelang_core.empty_loops import mended

TARGET = {"kind": "cuda", "arch": "sm_90a"}
WAIT = r"mbarrier\[4\]\.wait\(0\);"


def product(rows: Any) -> Any:
    """A tile of A times as many tiles of B as there are, possibly none."""
    n, m = rows or T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def made(A: T.Tensor((m, 64), "bfloat16"), B: T.Tensor((n, 64), "bfloat16"), C: T.Tensor((m, 64), "float32")):
        with T.Kernel(T.ceildiv(m, 64), threads=128) as bx:
            a, b = (T.alloc_shared((64, 64), "bfloat16") for _ in range(2))
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A[bx * 64, 0], a)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(n, 64), num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bx * 64, 0])

    return made


def of_stock(func: Any) -> str:
    target = determine_target(TARGET, return_object=True)
    with target:
        return tilelang.lower(func, target=target).kernel_source


def test_a_block_whose_loop_has_no_step_waits_too():
    text = generate(product(None), TARGET).text
    assert re.search(WAIT + r"\n *for \(int k_1 = 0; k_1 < \(\(n \+ 63\) >> 6\)", text)
    assert len(re.findall(WAIT, text)) == 1 and "== 0)" not in text


def test_stock_still_waits_in_the_first_step_alone():
    stock = of_stock(product(None))
    assert re.search(r"if \(k_1 == 0\) \{\n *" + WAIT, stock), "mended upstream: waits need not go ahead"
    assert mended(stock) == generate(product(None), TARGET).text


def test_a_loop_of_a_known_extent_is_left_as_it_is():
    text = generate(product(256), TARGET).text
    assert text == of_stock(product(256)) and re.search(r"if \(k_1 == 0\) \{\n *" + WAIT, text)


ALONE = "if (k == 0) {\n  mbarrier[4].wait(0);\n}\n"


@pytest.mark.parametrize("text", ["", ALONE, "for (int k = 0; k < n; ++k) {\n}\n"])
def test_other_texts_stay(text: str):
    assert mended(text) == text


def test_each_wait_goes_in_front_of_its_own_loop():
    loop = "{0}for (int {1} = 0; {1} < n; ++{1}) {{\n{0}  if ({1} == 0) {{\n{0}    mbarrier[{2}].wait(0);\n{0}  }}\n"
    waited = "{0}mbarrier[{2}].wait(0);\n{0}for (int {1} = 0; {1} < n; ++{1}) {{\n"
    places = (("", "i", 1), ("  ", "j", 2))
    end = "  }\n}\n"
    assert mended("".join(loop.format(*at) for at in places) + end) == (
        "".join(waited.format(*at) for at in places) + end
    )


def reversed_rows(rows: Any) -> Any:
    """A tile that threads write in front of a loop with barriers, and read behind it."""
    n = rows or T.dynamic("n")

    @T.prim_func
    def made(X: T.Tensor((128,), "float32"), Z: T.Tensor((n, 128), "float32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            kept, step = (T.alloc_shared((128,), "float32") for _ in range(2))
            total = T.alloc_fragment((128,), "float32")
            T.clear(total)
            for i in T.Parallel(128):
                kept[i] = X[i]
            for k in T.serial(n):
                for i in T.Parallel(128):
                    step[i] = Z[k, i]
                for i in T.Parallel(128):
                    total[i] += step[127 - i]
            for i in T.Parallel(128):
                Y[i] = kept[127 - i] + total[i]

    return made


BEHIND = r"\n  \}\n  if \(n <= 0\) \{\n    __syncthreads\(\);\n  \}\n  Y\["


def test_threads_synchronize_behind_a_loop_without_a_step():
    assert re.search(BEHIND, generate(reversed_rows(None), TARGET).text)
    assert generate(reversed_rows(7), TARGET).text == of_stock(reversed_rows(7))


def test_stock_still_takes_a_barrier_in_a_loop_for_one_behind_it():
    stock = of_stock(reversed_rows(None))
    assert re.search(r"\n  \}\n  Y\[", stock), "mended upstream: no barrier is needed behind"


def kernel(*lines: str) -> str:
    return "\n".join(['extern "C" __global__ void f(int n) {', *(f"  {line}" for line in lines), "}", ""])


LOOP, PARTIAL = "for (int {0} = 0; {0} < {1}; ++{0}) {{", "tl::__sync_thread_partial(3, 128);"


@pytest.mark.parametrize(
    ("lines", "behind"),
    [
        ([LOOP.format("i", "n"), f"  {PARTIAL}", "}"], [(3, PARTIAL)]),
        ([LOOP.format("i", "4"), "  __syncthreads();", "}"], []),
        ([LOOP.format("i", "n"), "  if (i == 0) {", "    __syncthreads();", "  }", "}"], []),
        ([LOOP.format("i", "n"), "  {", f"    {LOOP.format('j', '4')}", "      __syncthreads();", "    }", "  }", "}"],
         [(7, "__syncthreads();")]),
    ],
    ids=["of some threads", "known extent", "conditional", "nested"],
)  # fmt: skip
def test_which_barriers_stand_for_one_behind(lines: list[str], behind: list[tuple[int, str]]):
    wanted = list(lines)
    for place, barrier in behind:
        indent = lines[place - 1][: -len(lines[place - 1].lstrip())]
        wanted[place:place] = [f"{indent}if (n <= 0) {{", f"{indent}  {barrier}", f"{indent}}}"]
    assert mended(kernel(*lines)) == kernel(*wanted)
    assert mended("\n".join(lines)) == "\n".join(lines), "a device function, not a kernel"


STEPS, SYNC = LOOP.format("i", "4"), "__syncthreads();"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["if (n) {", STEPS, SYNC, "}", "}"], ["if (n) {", STEPS, SYNC, "}", "} else {", SYNC, "}"]),
        (["if (n) {", STEPS, SYNC, "}", "} else {", "n = 1;", "}"],
         ["if (n) {", STEPS, SYNC, "}", "} else {", "n = 1;", SYNC, "}"]),
        (["if (n) {", "n = 1;", "} else {", STEPS, PARTIAL, "}", "}"],
         ["if (n) {", "n = 1;", PARTIAL, "} else {", STEPS, PARTIAL, "}", "}"]),
        (["if (n) {", SYNC, "}"], None),
        (["if (((int)threadIdx.x) < 128) {", STEPS, PARTIAL, "}", "} else {", "n = 1;", "}"], None),
        (["int half = ((int)threadIdx.x) >> 7;", "int mine = half + 1;", "if (mine == 1) {", STEPS, PARTIAL, "}", "}"],
         None),
        (["while (1) {", "if (!(n)) { break; }", SYNC, "}"], ["while (1) {", SYNC, "if (!(n)) { break; }", SYNC, "}"]),
        (["while (1) {", "if (!(s[0])) { break; }", SYNC, "}"],
         ["while (1) {", SYNC, "if (!(s[0])) { break; }", SYNC, SYNC, "}"]),
        (["while (1) {", "if (!(n)) { break; }", "n = 1;", "}"], None),
    ],
    ids=["one side", "no else", "only else", "the program's own", "of some threads", "by a variable", "while",
         "while on memory", "while without"],
)  # fmt: skip
def test_branches_and_whiles(lines: list[str], wanted: list[str] | None):
    def words(of: list[str]) -> list[str]:
        return [line.strip() for line in of]

    assert words(mended(kernel(*lines)).split("\n")) == words(kernel(*(wanted or lines)).split("\n"))


def counted_down() -> Any:
    """A tile that threads reverse as often as a number in memory says."""

    @T.prim_func
    def made(X: T.Tensor((128,), "float32"), N: T.Tensor((1,), "int32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            kept, mine, n = T.alloc_shared((128,), "float32"), T.alloc_fragment((128,), "float32"), T.alloc_var("int32")
            n = N[0]
            T.copy(X, kept)
            while n > 0:
                for i in T.Parallel(128):
                    mine[i] = kept[127 - i]
                for i in T.Parallel(128):
                    kept[i] = mine[i]
                n = n - 1
            T.copy(kept, Y)

    return made


def test_stock_has_no_barrier_between_the_steps_of_a_while():
    step = r"while \(1\) \{\n( *__syncthreads\(\);\n)? *if \(!.*\n *mine\[0\] = .*\n *__syncthreads"
    stock = of_stock(counted_down())
    assert re.search(step, stock)[1] is None, "mended upstream: no barrier is needed in front of the condition"
    assert re.search(step, generate(counted_down(), TARGET).text)[1]
