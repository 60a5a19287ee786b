# SPDX-License-Identifier: MIT
"""`wire=` of collectives: what there is, and how a program is printed."""

import pytest

import tilescale.language as T
from tests.cuda.support import program
from tests.language.support import on_devices
from tilescale.errors import PhaseError, UsageError
from tilescale.hda import Machine
from tilescale.ops import whole_tensors
from tilescale.program.source import source_of
from tilescale.program.wire import WIRE


@pytest.mark.parametrize(
    ("call", "dtype", "said"),
    [
        (lambda X, Y: T.allreduce(X, out=Y, wire="int8"), "float32", "wire='int8'"),
        (lambda X, Y: T.allreduce(X, out=Y, wire=WIRE), "int32", "T.allreduce of int32"),
        (lambda X, Y: T.allreduce(X, out=Y, wire=WIRE, op="max"), "float32", "op='max'"),
        (lambda X, Y: T.allreduce(X, out=Y, wire=WIRE, impl="one_shot"), "float32", "impl='one_shot'"),
        (lambda X, Y: T.allreduce(X, wire=WIRE), "float32", "in place"),
        (lambda X, Y: T.reduce_scatter(X, Y[0:4], wire=WIRE, impl="ring"), "float32", "impl='ring'"),
        (lambda X, Y: T.all_gather(X[0:4], Y, wire="float8_e5m2"), "bfloat16", "wire='float8_e5m2'"),
        (lambda X, Y: T.all_gather(X, wire=WIRE), "bfloat16", "without dst"),
    ],
)
def test_a_wire_that_there_is_not(mistake, call, dtype: str, said: str):
    with mistake(UsageError, said):

        @T.prim_func
        def wrong(X: T.Tensor((8,), dtype), Y: T.Tensor((8,), dtype)):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    call(X, Y)  # <-


def test_a_wire_of_tiles(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.all_gather(tile[0:16, :], tile, wire=WIRE)  # <-

    with mistake(PhaseError, "T.all_gather where a block executes"):
        on_devices(wrong)


def test_the_source_text_names_it():
    made = program(whole_tensors.sum_program(2, "bfloat16", "sum", "two_shot", WIRE))
    text = source_of(made, Machine.load("h200-sxm-8"))
    assert "T.allreduce(X, out=Y, impl='two_shot', wire='float8_e4m3fn')" in text.replace('"', "'")
