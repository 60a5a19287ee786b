# SPDX-License-Identifier: MIT
"""The versions that docs/compatibility.md says were run are versions that TileScale's requirements allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
NEWEST = re.findall(r"^\| ([a-z0-9-]+) \| (\d[\d.]*)", PAGE.partition("## Newer versions")[2], re.MULTILINE)


def required() -> list[Requirement]:
    """Requirements of TileScale and of its extras."""
    project = pytest.importorskip("tomllib", reason="it is of Python 3.11").loads(
        (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    found = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    return [Requirement(each) for each in found]


@pytest.mark.parametrize(("name", "version"), NEWEST)
def test_the_newest_versions_are_allowed(name: str, version: str):
    """nvidia-nccl-cu13 comes with PyTorch alone."""
    named = [each for each in required() if each.name == name]
    assert named or name == "nvidia-nccl-cu13"
    assert all(each.specifier.contains(version) for each in named)


def test_the_page_names_the_version_that_tests_ran_with():
    (pin,) = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    (version,) = [each.version for each in pin.specifier]
    assert f"`make` installs {pin.name} {version} where there is no GPU" in PAGE
    assert NEWEST and all(each.specifier.contains(version) for each in required() if each.name == pin.name)
