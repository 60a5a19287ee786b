# SPDX-License-Identifier: MIT
"""Interfaces that serving engines call, without the engines: `tests/integrations/engines.py` has their real code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

from tests.comm.conftest import ROOT, command, run_words
from tilescale import ops, plugins
from tilescale.errors import UsageError
from tilescale.ops import engine_plugins, symm_mem
from tilescale.settings import settings

SCRIPT = Path(__file__).parent / "scripts/engines.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
EMULATED = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_communicator_and_fused_all_reduce(ranks: int):
    done = run_words([*command("tilescale run", ranks), str(SCRIPT)], **EMULATED)
    assert done.code == 0, done.output
    assert all(done.output.count(f"passed {check}") == ranks for check in CHECKS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TILESCALE_PLUGIN is set, and what a plugin replaces of PyTorch comes back."""
    monkeypatch.setenv("TILESCALE_PLUGIN", "1")
    settings.cache_clear()
    yield
    settings.cache_clear()
    ops.uninstall()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """A module of an engine, by its name, within packages without anything."""
    name = f"{request.param}.{engine_plugins.DEVICE_COMMUNICATORS}"
    for parent in accumulate(name.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    return sys.modules[name]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plugin_that_nobody_asks_for_imports_nothing(engine: str):
    text = f"import sys; from tilescale import plugins; plugins.{engine}(); print(*sys.modules)"
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "tilelang", "tilescale.ops", "vllm", "sglang"} & set(done.stdout.split())


@pytest.mark.parametrize("module", ["vllm"], indirect=True)
def test_the_plugin_of_vllm_is_loaded_twice(module: ModuleType, asked: None):
    module.CustomAllreduce = object  # type: ignore[attr-defined]
    for _ in range(2):
        plugins.vllm()
        assert module.CustomAllreduce is engine_plugins.VllmCommunicator  # type: ignore[attr-defined]
        assert symm_mem._library is not None


@pytest.mark.parametrize(
    ("module", "engine", "slot"),
    [("vllm", "vllm", "CustomAllreduce"), ("sglang.srt", "sglang", "dispatch_custom_allreduce")],
    indirect=["module"],
)
def test_an_engine_without_the_slot_is_named(module: ModuleType, engine: str, slot: str, asked: None):
    with pytest.raises(UsageError, match=f"TILESCALE_PLUGIN is set, but there is no {slot} in {module.__name__}"):
        getattr(plugins, engine)()
    assert symm_mem._library is None


def test_entry_points_name_functions_that_there_are():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'plugins"\]\ntilescale = "([\w.]+):(\w+)"', text)
    assert [name for module, name in named if module == plugins.__name__] == ["vllm", "sglang"]
    assert all(callable(getattr(plugins, name)) for _, name in named)
