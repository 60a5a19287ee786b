# SPDX-License-Identifier: MIT
"""What serving engines call, without them: `tests/integrations/engines.py` has their real code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.comm.conftest import ROOT, command, run_words
from tilescale import ops
from tilescale.ops import engine_plugins
from tilescale.ops.communicator import Communicator

SCRIPT = Path(__file__).parent / "scripts/engines.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
EMULATED = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_communicator_and_fused_all_reduce(ranks: int):
    done = run_words([*command("tilescale run", ranks), str(SCRIPT)], **EMULATED)
    assert done.code == 0, done.output
    assert all(done.output.count(f"passed {check}") == ranks for check in CHECKS)


class Theirs:
    """An engine's own class."""

    shared = "kept"

    def custom_all_reduce(self, x: object) -> str:
        return "theirs"


def test_the_plugin_of_vllm_is_loaded_twice(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType(engine_plugins.VLLM)
    module.CustomAllreduce = Theirs  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, engine_plugins.VLLM, module)
    try:
        engine_plugins.vllm()
        made = module.CustomAllreduce  # type: ignore[attr-defined]
        engine_plugins.vllm()
        assert module.CustomAllreduce is made  # type: ignore[attr-defined]
        assert issubclass(made, Communicator) and issubclass(made, Theirs) and made.shared == "kept"
        assert made.custom_all_reduce is Communicator.custom_all_reduce
    finally:
        ops.uninstall()


def test_what_is_no_class_stays():
    assert engine_plugins.in_place_of(print) is print


def test_entry_points_name_functions_that_there_are():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'plugins"\]\ntilescale = "([\w.]+):(\w+)"', text)
    assert [name for module, name in named if module == engine_plugins.__name__] == ["vllm", "sglang"]
    assert all(callable(getattr(engine_plugins, name)) for _, name in named)
