# SPDX-License-Identifier: MIT
"""Options of the wrong type or value raise errors with the supported ones."""

import pytest
import torch

import tilescale
from tests.runtime import programs
from tilescale.errors import ShapeError, UsageError

WRONG = [
    (lambda func, args: tilescale.emulate(func, args, machine=3), "machine=3 is of type int"),
    (lambda func, args: tilescale.emulate(func, args, check=1), "check=1 is of type int"),
    (lambda func, args: tilescale.emulate(func, args, check=[1]), "check=1: the checks are"),
    (lambda func, args: tilescale.emulate(func, args, schedule_seed="a"), "schedule_seed='a' is of type str"),
    (lambda func, args: tilescale.emulate(func, args, schedule_seed=True), "schedule_seed=True is of type bool"),
    (lambda func, args: tilescale.use_machine(3).__enter__(), "machine=3 is of type int"),
    (lambda func, args: tilescale.compile(func, wait_s="3"), "wait_s='3' is of type str"),
    (lambda func, args: tilescale.compile(func, wait_s=-1), "wait_s=-1"),
    (lambda func, args: tilescale.compile(func, team=3), "team=3 is of type int"),
    (lambda func, args: tilescale.compile(func, out_idx="1"), "out_idx='1' is of type str"),
    (lambda func, args: tilescale.compile(func, out_idx=[0.5]), "out_idx=0.5 is of type float"),
    (lambda func, args: tilescale.compile(func, pass_configs=3), "pass_configs=3 is of type int"),
    (lambda func, args: tilescale.compile(func, target="cuad"), "target='cuad': Target cuad is not supported"),
    (lambda func, args: tilescale.compile(func, target={"kind": "cuda", "arhc": "sm_90a"}), "target=.*arhc"),
    (lambda func, args: tilescale.compile(func, target=3), "target=3: AttributeError"),
    (lambda func, args: tilescale.jit(3), "function=3 is of type int"),
    (lambda func, args: tilescale.from_tensor([1]), r"tensor=\[1\] is of type list"),
    (lambda func, args: tilescale.empty("a"), "shape='a' is of type str"),
    (lambda func, args: tilescale.empty((2, 1.5)), "shape=1.5 is of type float"),
    (lambda func, args: tilescale.zeros(4, dtype="float32"), "dtype='float32' is of type str"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_option_says_what_to_pass(call, message):
    with pytest.raises(UsageError, match=message) as found:
        call(programs.double(8), [torch.zeros(8), torch.zeros(8)])
    assert found.value.hint


def test_right_options_are_taken():
    assert tilescale.empty(torch.Size([2, 3])).shape == (2, 3)
    assert tilescale.zeros(torch.tensor(4), torch.int32).tolist() == [0] * 4
    with pytest.raises(ShapeError):
        tilescale.zeros(-4)
    for target in ("auto", "cuda", {"kind": "cuda", "arch": "sm_80"}):
        tilescale.compile(programs.double(8), target=target, wait_s=1, pass_configs={}, compile_flags="-O3")


def test_tensors_without_values_ask_for_the_time_alone():
    report = tilescale.emulate(programs.double(8), [torch.zeros(8, device="meta"), torch.zeros(8, device="meta")])
    assert report.time_us > 0
