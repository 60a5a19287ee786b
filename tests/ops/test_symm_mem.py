# SPDX-License-Identifier: MIT
"""PyTorch's fused operators by TileScale: values and layouts in a job, what is registered, what falls back."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.comm.conftest import command, run_words
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import symm_mem

SCRIPT = Path(__file__).parent / "scripts/symm_mem.py"
EMULATED = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    ops.uninstall()


def registered(name: str) -> str:
    """The implementation that the dispatcher calls on CUDA."""
    dump = torch._C._dispatch_dump(f"symm_mem::{name}")
    return next(line for line in dump.splitlines() if re.match(r"\s*CUDA(\s|:|\()", line))


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_and_layouts_are_those_of_pytorch(ranks: int):
    done = run_words([*command("tilescale run", ranks), str(SCRIPT)], **EMULATED)
    assert done.code == 0, done.output
    checks = re.findall(r"^def (check_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(done.output.count(f"passed {check}") == ranks for check in checks)


@pytest.mark.parametrize("name", symm_mem.IMPLEMENTATIONS)
def test_operators_are_replaced_and_put_back(name: str):
    symm_mem._theirs()
    before = registered(name)
    with ops.installed():
        assert "tilescale/ops/symm_mem.py" in registered(name)
        with ops.installed():
            ops.install()
        assert "tilescale/ops/symm_mem.py" in registered(name)
    assert registered(name) == before


def test_unsupported_inputs_run_the_other_implementation_and_warn_once(monkeypatch: pytest.MonkeyPatch):
    theirs = symm_mem._theirs()
    monkeypatch.setattr(theirs, "_fused_matmul_reduce_scatter", lambda *given: ("theirs", *given))

    def refuse(*given: object) -> None:
        raise ArgumentError("the result is scaled")

    symm_mem.calls.clear()
    call = symm_mem._or_theirs("fused_matmul_reduce_scatter", refuse)
    with pytest.warns(UserWarning, match="PyTorch's implementation: the result is scaled"):
        assert call(1, 2) == ("theirs", 1, 2)
    assert call(3) == ("theirs", 3)  # a second warning would be an error
    assert symm_mem.calls["fused_matmul_reduce_scatter", "the result is scaled"] == 2


def test_the_command_says_what_is_replaced():
    done = subprocess.run([warm.python(), "-m", "tilescale.ops.install"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(f"symm_mem::{name}: " in done.stdout for name in symm_mem.IMPLEMENTATIONS)
    assert all(f"-> tilescale.ops.{name}" in done.stdout for name in symm_mem.PATTERNS.values())
