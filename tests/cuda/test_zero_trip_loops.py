# SPDX-License-Identifier: MIT
"""TileLang's waits inside a loop are executed for zero trips too; elsewhere the text remains TileLang's."""

import re
from typing import Any

import pytest
import tilelang
from tilelang.backend.target import determine_target

import tilescale.language as T
from tilelang_core.compile import generate
from tilelang_core.zero_trip_loops import mended

TARGET = {"kind": "cuda", "arch": "sm_90a"}
WAIT = r"mbarrier\[4\]\.wait\(0\);"


def product(rows: Any, least: int = 0, dim: int = 64) -> Any:
    """A tile of A times as many tiles of B as there are, possibly none."""
    n, m = rows or T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def made(A: T.Tensor((m, dim), "bfloat16"), B: T.Tensor((n, dim), "bfloat16"), C: T.Tensor((m, 64), "float32")):
        with T.Kernel(T.ceildiv(m, 64), threads=128) as bx:
            a, b = (T.alloc_shared((64, dim), "bfloat16") for _ in range(2))
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A[bx * 64, 0], a)
            T.clear(c)
            for k in T.Pipelined(bx + least if least else T.ceildiv(n, 64), num_stages=2):
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
    assert re.search(
        r"if \((\(\(n \+ 63\) >> 6\)) <= 0\) \{\n *" + WAIT + r"\n *\}\n *for \(int (k_1) = 0; k_1 < \(\(n", text
    )
    assert len(re.findall(WAIT, text)) == 2


def test_stock_still_waits_in_the_first_step_alone():
    stock = of_stock(product(None))
    assert len(re.findall(r"if \(k_1 == 0\) \{\n *" + WAIT, stock)) == len(re.findall(WAIT, stock)) == 1, (
        "mended upstream: a loop without a step is waited for"
    )
    assert mended(stock) == generate(product(None), TARGET).text


@pytest.mark.parametrize("func", [product(256), product(None, least=1)], ids=["constant", "blockIdx.x + 1"])
def test_a_loop_that_has_a_step_is_left_as_it_is(func: Any):
    text = generate(func, TARGET).text
    assert text == of_stock(func) and re.search(r"if \(k_1 == 0\) \{\n *" + WAIT, text)


def kernel(*lines: str) -> str:
    return "\n".join(['extern "C" __global__ void f(int n) {', *(f"  {line}" for line in lines), "}", ""])


def words(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n")]


def added(lines: list[str]) -> list[str]:
    """The lines added to a kernel, each with its number in the result."""
    before, after = words(kernel(*lines)), words(mended(kernel(*lines)))
    found, place = [], 0
    for i, line in enumerate(after):
        if place < len(before) and line == before[place]:
            place += 1
        else:
            found.append(f"{i}: {line}")
    assert place == len(before), "nothing is taken away"
    return found


def loop(bound: str, *inside: str, name: str = "i") -> list[str]:
    return [f"for (int {name} = 0; {name} < {bound}; ++{name}) {{", *inside, "}"]


def waiting(bound: str, *before: str) -> list[str]:
    return [*before, *loop(bound, "if (i == 0) {", "mbarrier[1].wait(0);", "}")]


@pytest.mark.parametrize(
    "bound",
    ["4", "(((int)blockIdx.x) + 1)", "min(((((int)blockIdx.x) * 2) + 2), 16)", "((((int)blockIdx.x) + 64) >> 6)",
     "max(n, 1)", "((((int)blockIdx.y) * 3) - (0 - 1))", "((((int)blockIdx.x) + 4) / 2)"],
)  # fmt: skip
def test_extents_that_are_at_least_one(bound: str):
    assert added(waiting(bound)) == []
    assert added(waiting("m", f"int m = {bound};")) == []


@pytest.mark.parametrize(
    "bound",
    ["n", "((n + 63) >> 6)", "min((((int)blockIdx.x) + 1), n)", "((int)blockIdx.x)", "(5 - ((int)blockIdx.x))",
     "((((int)blockIdx.x) + 63) >> 6)", "max(n, 0)", "lengths[0]", "(n ? 1 : 2)", "((((int)blockIdx.x) + 1) % 2)"],
)  # fmt: skip
def test_extents_that_may_be_zero(bound: str):
    assert added(waiting(bound)) == [f"1: if ({bound} <= 0) {{", "2: mbarrier[1].wait(0);", "3: }"]
    assert len(added(waiting("m", f"int m = {bound};"))) == 3


def test_a_variable_has_the_bounds_of_all_that_it_is_set_to():
    branches = "int m;", "if (n < 2) {", "m = {};", "} else {", "m = (((int)blockIdx.x) + 1);", "}"
    assert added(waiting("m", *(line.replace("{}", "3") for line in branches))) == []
    assert added(waiting("m", *(line.replace("{}", "n") for line in branches))) != []
    assert added(waiting("m", "int m = 1;", "m = (m - 1);")) != [], "set from itself"


def test_each_wait_goes_in_front_of_its_own_loop():
    lines = [*waiting("n"), *[line.replace("i ", "j ").replace("++i", "++j") for line in waiting("m")]]
    assert [line.split(": ")[1] for line in added(lines)] == [
        "if (n <= 0) {", "mbarrier[1].wait(0);", "}", "if (m <= 0) {", "mbarrier[1].wait(0);", "}",
    ]  # fmt: skip


def reversed_rows(rows: Any) -> Any:
    """A tile that threads write before a loop with barriers, and read after it."""
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


def test_threads_synchronize_without_a_step():
    text = generate(reversed_rows(None), TARGET).text
    assert re.search(r"\n  if \(n <= 0\) \{\n    __syncthreads\(\);\n  \}\n  for \(int k = 0", text)
    assert generate(reversed_rows(7), TARGET).text == of_stock(reversed_rows(7))


def test_stock_still_takes_a_barrier_in_a_loop_for_one_behind_it():
    stock = of_stock(reversed_rows(None))
    assert re.search(r"\n  \}\n  Y\[", stock) and "<= 0" not in stock, "mended upstream: no barrier is needed"


DECLARED = "extern __shared__ uchar buf[];"
USE, ALIAS, SYNC = "buf[1] = 1;", "void* a = ((void*)((char*)buf + 8));", "__syncthreads();"
PARTIAL = "tl::__sync_thread_partial(3, 128);"
STEPS = loop("4", SYNC, name="s")


@pytest.mark.parametrize(
    "lines",
    [
        [USE, *loop("n", SYNC), USE],
        [ALIAS, "((float*)a)[0] = 1;", *loop("n", "x = 1;", SYNC), "x = ((float*)a)[0];"],
        loop("4", *loop("n", SYNC), USE, name="o"),
        loop("n", *loop("m", SYNC), USE, name="o"),
        [USE, "if (n) {", SYNC, "}", *loop("n", SYNC), USE],
        [USE, *loop("n", SYNC), "if (n) {", "x = 1;", SYNC, "}", USE],
        [USE, "{", *loop("n", "{", SYNC, "}"), "}", USE],
    ],
    ids=["around", "alias", "outer loop comes back", "outer loop of unknown extent", "conditional barrier before",
         "conditional barrier behind", "nested"],
)  # fmt: skip
def test_barriers_that_order_something(lines: list[str]):
    found = [line.split(": ")[1] for line in added([DECLARED, *lines])]
    assert found in (["if (n <= 0) {", SYNC, "}"], ["if (m <= 0) {", SYNC, "}"])


@pytest.mark.parametrize(
    "lines",
    [
        [USE, *loop("n", SYNC)],
        [*loop("n", SYNC), USE],
        [USE, *loop("(((int)blockIdx.x) + 1)", SYNC), USE],
        [USE, SYNC, *loop("n", SYNC), USE],
        [USE, *loop("n", SYNC), "{", SYNC, "}", USE],
        [USE, *loop("n", SYNC), *STEPS, USE],
        [USE, *loop("n", "if (i == 0) {", SYNC, "}"), USE],
        [USE, "if (n) {", SYNC, USE, "}"],
        ["if (n) {", USE, *STEPS, "}"],
        ["if (n) {", USE, *STEPS, "} else {", *loop("n", SYNC), USE, "}"],
        loop("4", SYNC, *loop("n", SYNC), USE, name="o"),
        loop("4", *loop("n", SYNC, USE), name="o"),
        ["__shared__ uint64_t mbarrier_mem[5];", "mbarrier_mem[0];", *loop("n", SYNC), "mbarrier_mem[0];"],
    ],
    ids=["nothing behind", "nothing before", "a step in any case", "a barrier before", "a barrier behind",
         "a barrier in a loop behind", "conditional", "the program's own", "a branch with nothing around",
         "the other side", "a barrier in each iteration",
         "an iteration without a step uses nothing", "mbarriers"],
)  # fmt: skip
def test_barriers_that_order_nothing_more(lines: list[str]):
    assert added([DECLARED, *lines]) == []


def test_what_stands_before_and_behind_one_loop_is_ordered_once():
    twice = [USE, *loop("n", SYNC), *loop("m", SYNC, name="j"), USE]
    assert [line.split(": ")[1] for line in added([DECLARED, *twice])] == ["if (n <= 0) {", SYNC, "}"]


def test_device_functions_stay():
    lines = [DECLARED, USE, *loop("n", SYNC), USE]
    assert mended("\n".join(lines)) == "\n".join(lines)


FIRST, SECOND = "if (((int)threadIdx.x) < 128) {", "if (128 <= ((int)threadIdx.x)) {"
BREAK = "if (!(n)) { break; }"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([FIRST, USE, *loop("n", PARTIAL), USE, "}"], 3),
        ([FIRST, USE, *loop("n", PARTIAL), USE, "}", FIRST, PARTIAL, "}"], 3),
        ([FIRST, USE, *loop("n", PARTIAL), USE, "} else {", "while (1) {", BREAK, PARTIAL, "}", "}"], 0),
        ([FIRST, USE, *loop("n", PARTIAL), USE, "}", SECOND, PARTIAL, "}"], 0),
        ([FIRST, USE, *loop("n", PARTIAL), USE, "}", SECOND, "tl::__named_barrier_arrive(3, 128);", "}"], 0),
        ([FIRST, USE, *loop("n", PARTIAL), USE, "}", SECOND, PARTIAL.replace("3", "4"), "}"], 3),
        ([FIRST, USE, *loop("n", SYNC), USE, "}", USE], 3),
        (["int half = ((int)threadIdx.x) >> 7;", "int mine = half + 1;", USE, "if (mine == 1) {", *STEPS, "}", USE], 0),
    ],
    ids=["one group", "the same group again", "a partner spells its loop otherwise", "a partner without a loop",
         "a partner only arrives", "another barrier", "full", "by a variable"],
)  # fmt: skip
def test_barriers_of_some_threads(lines: list[str], wanted: int):
    """A group whose partner reaches the same barrier elsewhere gets none: the partner would not arrive again."""
    assert len(added([DECLARED, *lines])) == wanted


def two_groups() -> Any:
    """Warpgroups that synchronize `n` times at a barrier of the program, each in a loop of a different form."""

    @T.prim_func
    def made(X: T.Tensor((128,), "float32"), n: T.int32, Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            kept = T.alloc_shared((128,), "float32")
            tx, left = T.get_thread_binding(), T.alloc_var("int32")
            T.copy(X, kept)
            if tx < 128:
                for _ in T.serial(n):
                    kept[tx] = kept[tx] + 1
                    T.sync_threads(9, 256)
                Y[tx] = kept[127 - tx]
            else:
                left = n
                while left > 0:
                    T.sync_threads(9, 256)
                    left = left - 1

    return made


def test_groups_that_meet_come_to_their_barrier_equally_often():
    text = generate(two_groups(), TARGET).text
    assert text.count("tl::__sync_thread_partial(9, 256);") == 2


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([USE, "if (n) {", *STEPS, "}", USE], ["7: } else {", f"8: {SYNC}"]),
        ([USE, "if (n) {", *STEPS, "} else {", "n = 1;", "}", USE], [f"9: {SYNC}"]),
        ([USE, "if (n) {", "n = 1;", "} else {", *STEPS, "}", USE], [f"5: {SYNC}"]),
        ([USE, "if (n) {", *STEPS, "} else {", SYNC, "}", USE], []),
        ([USE, FIRST, *loop("4", PARTIAL), "} else {", "n = 1;", "}", USE], []),
        (["while (1) {", "if (!(n)) { break; }", USE, SYNC, USE, "}"], [f"3: {SYNC}"]),
        (["while (1) {", "if (!(buf[0])) { break; }", USE, SYNC, "x = buf[0];", "}"], [f"3: {SYNC}", f"5: {SYNC}"]),
        (["while (1) {", "if (!(n)) { break; }", USE, "}"], []),
        (["while (1) {", "if (!(n)) { break; }", SYNC, USE, SYNC, "}"], []),
        ([USE, "while (1) {", "if (!(n)) { break; }", "x = 1;", SYNC, "}", USE], [f"4: {SYNC}"]),
    ],
    ids=["one side", "no else", "only else", "the program's own", "of some threads", "while", "while on memory",
         "while without", "while with both", "while without a step"],
)  # fmt: skip
def test_branches_and_whiles(lines: list[str], wanted: list[str]):
    assert added([DECLARED, *lines]) == wanted


def counted_down() -> Any:
    """A tile that threads reverse, a number of times that is loaded from memory."""

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
