# SPDX-License-Identifier: MIT
"""Lowering leaves Z3's parameters as the user has them, and proves what it proved before."""

import subprocess
import sys

import pytest
import z3
from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from tilelang_core import prover
from tilelang_core.prover import proving

CUTS = "smt.arith.enable_hnf"


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_changed_for_the_block_alone(fails: bool):
    before = z3.get_param(CUTS)
    try:
        with proving():
            assert z3.get_param(CUTS) == "false"
            with proving():
                pass
            assert z3.get_param(CUTS) == "false"
            if fails:
                raise ValueError("mine")
    except ValueError:
        assert fails
    assert z3.get_param(CUTS) == before


def test_quotients_and_remainders_are_related():
    x = tirx.Var("x", "int32")
    with proving():
        analyzer = Analyzer()
        analyzer.bind(x, Range(0, 1 << 20))
        assert analyzer.can_prove(x % 7 + x // 7 % 3 * 7 == x % 21)
        assert not analyzer.can_prove(x // 8 * 4 == x // 2)


FAULTS = """
import resource
import runpy
import sys
from z3 import Context
proving = runpy.run_path(sys.argv[1])["proving"]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        Context()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
with proving():
    faults()
    print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the faults of glibc's malloc")
def test_contexts_reuse_memory():
    """In a process that loads Z3 alone."""
    done = subprocess.run([sys.executable, "-c", FAULTS, prover.__file__], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10  # a mapped context has more than a hundred
