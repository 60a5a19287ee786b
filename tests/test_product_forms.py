# SPDX-License-Identifier: MIT
"""Forms of GEMMs that a benchmark races: right in the emulator, and on GPUs as their names indicate."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tilescale
from tests.cuda.support import bodies, notes, source
from tests.halves import every_second_at_night
from tilescale.hda.current import use_machine

FOLDER = Path(__file__).parents[1] / "benchmarks"
M, N, K = 1024, 512, 256
NAMES = ["a block a tile", "in turns", "in turns, counted", "clusters"]


@pytest.fixture(scope="module")
def works() -> Iterator[ModuleType]:
    places = [str(FOLDER), str(FOLDER / "works")]
    sys.path[:0] = places
    yield importlib.import_module("product_forms")
    for place in places:
        sys.path.remove(place)


def program(works: ModuleType, name: str, dtype: str) -> Any:
    with use_machine("h200-sxm-8"):
        return works.forms(M, N, K, dtype)[name]()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_forms_are_right(works: ModuleType, name: str, dtype: str):
    kind, is_scaled = getattr(torch, dtype), dtype != "bfloat16"
    a, b = (torch.randn(rows, K).to(kind) for rows in (M, N))
    of_a, of_b = (torch.rand(1, M), torch.rand(N)) if is_scaled else (torch.ones(1, 1).to(kind), torch.ones(1).to(kind))
    unused = [torch.zeros(1, M, N, dtype=torch.bfloat16) for _ in range(2)]
    c, bias = torch.full((1, M, N), torch.nan, dtype=torch.bfloat16), torch.full((1,), torch.nan, dtype=torch.bfloat16)
    tilescale.emulate(program(works, name, dtype), [[a[None], b, bias, of_a, of_b, c, *unused]], machine="h200-sxm-8")
    want = a.float() @ b.float().T * of_a.float().T * of_b.float()
    torch.testing.assert_close(c[0].float(), want, rtol=2**-7, atol=float(want.abs().mean()) * 2**-7)


@pytest.mark.parametrize("name", every_second_at_night(NAMES))
def test_forms_are_what_their_names_say(works: ModuleType, name: str):
    made = program(works, name, "float8_e4m3fn")
    text, said = bodies(source(made)), notes(made)
    assert ("tilescale::signal<" in text) == (name != "clusters")
    assert any(note.startswith("compute -> store") for note in said) == name.startswith("in turns")
    assert ("tma_load_multicast" in text) == name.startswith("clusters")
    assert any(note.startswith("persistent roles") for note in said) == name.startswith("in turns")


def test_both_types_race_in_all_shapes(works: ModuleType):
    *heats, tiles = works.heats(False, 1)
    assert len(heats) == 8 and not list(works.heats(False, 2))
    assert all([one.name for one in heat.contenders] == ["cublas alone", *NAMES] for heat in heats)
    assert len(tiles.contenders) == 1 + len(works.TILES) * len(works.TILED)
