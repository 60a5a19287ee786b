# SPDX-License-Identifier: MIT
"""The pass over inductor's graphs: results of what it replaces in a job of ranks, and the setting that it is."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.comm.conftest import command, run_words
from tilescale import ops
from tilescale.ops import graph_pass

SCRIPT = Path(__file__).parent / "scripts/graphs.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
EMULATED = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
config = torch._inductor.config


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    ops.uninstall()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [CHECKS[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in CHECKS[1:])]
)
def test_compiled_functions_give_what_eager_ones_give(check: str):
    if check == "check_llama":
        pytest.importorskip("transformers")
    done = run_words([*command("tilescale run", 2), str(SCRIPT), check], **EMULATED)
    assert done.code == 0 and done.output.count(f"passed {check}") == 2, done.output


def test_the_pass_is_there_while_it_is_installed():
    with ops.installed():
        assert config.post_grad_custom_pre_pass is None
        with ops.installed(graphs=True):
            assert isinstance(config.post_grad_custom_pre_pass, graph_pass.OperatorFusion)
        assert config.post_grad_custom_pre_pass is None
    assert config.post_grad_custom_pre_pass is None


def test_another_pass_still_runs_first_and_is_put_back():
    seen: list[str] = []

    def other(graph: torch.fx.Graph) -> None:
        seen.append(threading.current_thread().name)

    config.post_grad_custom_pre_pass = other
    try:
        torch._dynamo.reset()
        with ops.installed(graphs=True), config.patch(fx_graph_cache=False):
            y = torch.compile(lambda x: (x @ x).sin().sum())(torch.randn(8, 8, requires_grad=True))
            backward = threading.Thread(target=y.backward, name="backward")  # as autograd runs it on GPUs
            backward.start()
            backward.join()
        assert seen == ["MainThread", "backward"]
        assert config.post_grad_custom_pre_pass is other
    finally:
        config.post_grad_custom_pre_pass = None
