# SPDX-License-Identifier: MIT
"""Reports of tests that fail with TVM's objects at hand reach the process that prints them."""

import pytest

import tilescale.language as T
from tests.conftest import plain


def test_strings_of_tvm_can_be_sent():
    execnet = pytest.importorskip("execnet")

    @T.prim_func
    def program(X: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            X[0] = 1

    report = {"args": [("program", repr(program)), ("line", 3)], "keywords": {"a": 1}}
    with pytest.raises(execnet.DumpError):
        execnet.dumps(report)
    assert execnet.loads(execnet.dumps(plain(report))) == report
