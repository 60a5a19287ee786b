# SPDX-License-Identifier: MIT
"""A machine of few blocks, so that each executes several tasks of a phase; programs that GPUs can run."""

from typing import Any

import pytest

import tilescale
from tilescale.hda import Machine

FEW = 5


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """H200s with few SMs."""
    path = tmp_path_factory.mktemp("machine") / "small.yaml"
    path.write_text(f"extends: h200-sxm-8\ntitle: small\nlevels: {{block: {{count: {FEW}}}}}\n", encoding="utf-8")
    return Machine.load(path)


@pytest.fixture(autouse=True)
def _only_what_gpus_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated programs must have a lowering: no GPU runs a launch that only the emulator knows."""
    emulate = tilescale.emulate

    def emulated(*args: Any, **options: Any) -> Any:
        report = emulate(*args, **options)
        if report.unsupported is not None:
            raise report.unsupported
        return report

    monkeypatch.setattr(tilescale, "emulate", emulated)
