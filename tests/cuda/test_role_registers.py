# SPDX-License-Identifier: MIT
"""Registers that threads set before, in and behind pipelined loops: the texts do what the program says.

tests/gpu/order_check.py executes the same programs on GPUs.
"""

import re

import pytest

from tests.cuda.register_programs import PROGRAMS
from tests.cuda.support import source

CLEARS = re.compile(r"make_float[24]\(broadcast_var")
LOOP = re.compile(r"\n( *)for \(int (?:turn|v_?|k) = 0")
ROLES = "if (((int)threadIdx.x) < 128) {"


def kernel(name: str) -> str:
    """The kernel of a program."""
    text = source(PROGRAMS[name]())
    return text[text.rindex('extern "C" __global__') :]


def test_a_sum_over_two_loops_begins_once():
    text = kernel("sums_over_two_loops")
    clear, loop, roles = CLEARS.search(text), text.index("for (int turn"), text.index(ROLES)
    assert clear is not None and clear.start() < loop < roles, "cleared by consumers before both loops"
    assert len(CLEARS.findall(text)) == 1
    assert "if (128 <= ((int)threadIdx.x)) {" in text[: clear.start()]


def test_what_is_set_before_a_branch_is_set_where_it_is_not_taken():
    text = kernel("set_before_a_branch")
    clear = CLEARS.search(text)
    assert clear is not None and clear.start() < text.index("< X[0]")
    assert ROLES in text


@pytest.mark.parametrize(("name", "change"), [("set_behind_the_loop", "(at * 2) + 1"), ("set_in_the_loop", "at * 2")])
def test_all_threads_see_what_loads_depend_on(name: str, change: str):
    text = kernel(name)
    assert ROLES not in text, "a producer would load with values that only consumers have set"
    assert text.count(f"at = ({change})") == 1
    loads = [found.start() for found in re.finditer(r"\(half_t\*\)a\)\[", text)]
    assert loads, "tile a is loaded"


def test_a_loop_whose_loads_depend_on_it_loads_nothing_ahead():
    text = kernel("set_in_the_loop")
    assert "cp_async" not in text and "tma_load" not in text
    assert "cp_async" in kernel("set_behind_the_loop"), "its loop is pipelined: it does not set `at`"


def test_a_name_keeps_the_value_from_before_the_loop():
    text = kernel("set_behind_the_loop")
    assert text.index("int first = (at + 1)") < LOOP.search(text).start()
