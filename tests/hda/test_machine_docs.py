# SPDX-License-Identifier: MIT
"""The pages of machines cannot rot: their tables are the schema's, their examples load, answers are the machine's."""

import doctest
import os
import re
from pathlib import Path

import pytest

from tilescale.hda import Machine, machine, model, schema

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "machines.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {name: getattr(model, name) for name in model.__all__ if isinstance(getattr(model, name), type)}
SECTIONS["Machine"] = machine.Machine


def with_tables(text: str) -> str:
    """The page with every table written anew after its marker."""
    for name, section in SECTIONS.items():
        marker = f"<!-- schema: {name} -->"
        table = f"{marker}\n\n{schema.table(section)}\n\n"
        text = re.sub(rf"{marker}\n+(\|[^\n]*\n)*\n*", lambda _, table=table: table, text)
    return text


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_its_table(name):
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(with_tables(TEXT), encoding="utf-8")
    assert f"<!-- schema: {name} -->\n\n{schema.table(SECTIONS[name])}\n\n" in PAGE.read_text(encoding="utf-8"), (
        "run UPDATE_DOCS=1 pytest tests/hda/test_machine_docs.py"
    )


def descriptions(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_walk_through_loads(tmp_path):
    first, _ = descriptions(DOCS / "own-chip.md")
    (second,) = descriptions(PAGE)
    (tmp_path / "chip.yaml").write_text(first)
    chip = Machine.load(tmp_path / "chip.yaml")
    assert chip.tensor_level.name == "chip" and chip.count("core") == 64
    assert chip.path("chip", 0, 3).time(1 << 20, "dma") == pytest.approx(0.4e-6 + 1.5e-6 + (1 << 20) / 28.8e9)
    (tmp_path / "servers.yaml").write_text(second)
    servers = Machine.load(tmp_path / "servers.yaml")
    assert servers.count("device") == 16 and servers.network("node").name == "ethernet"
    assert [net.name for net in servers.networks] == ["dsmem", "nvlink", "ethernet"]


def test_the_questions_have_these_answers():
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS, verbose=False)
    assert results.attempted > 10 and results.failed == 0


def test_all_built_in_machines_are_named():
    for name in Machine.names():
        assert f"`{name}`" in TEXT
