# SPDX-License-Identifier: MIT
"""Persistent loops whose warps keep their roles: which have them, and what each role executes."""

import re
from typing import Any

import pytest

from tests.cuda import overlap_programs as programs
from tests.cuda.support import bodies, notes, source

SMALL = (2048, 512, 512)

KEPT = {
    "gather": lambda: programs.ag_gemm(shape=SMALL, blocks=12, stages=2),
    "scatter": lambda: programs.rs_gemm(shape=SMALL, blocks=12, stages=2),
    "straight to the owner": lambda: programs.rs_gemm(shape=SMALL, blocks=12, stages=2, direct=True),
}


def is_kept(func: Any) -> bool:
    """Whether warps keep their roles in all turns."""
    return any("warps keep their roles" in note for note in notes(func))


def roles(func: Any) -> tuple[str, str]:
    """What the threads that compute, and those that load, execute."""
    text = bodies(source(func))
    computes, loads = text.split("tl::warpgroup_reg_dealloc<")
    return computes.split("tl::warpgroup_reg_alloc<")[1], loads


@pytest.mark.parametrize("name", KEPT)
def test_roles_stand_around_the_turns(name: str):
    func = KEPT[name]()
    assert is_kept(func)
    for role in roles(func):
        outer, inner = re.findall(r"^ *for \(int (?!i)\w+ = 0;", role, re.MULTILINE)[:2]
        assert outer.index("for") < inner.index("for"), "the pipelined loop stands in the other one"
        assert role.count("warpgroup_reg") == 0, "registers are handed over once"


@pytest.mark.parametrize("name", KEPT)
def test_who_loads_does_nothing_else(name: str):
    """Tiles of the loop come by bulk loads of one role; parts that the other reads at its end are its own affair."""
    computes, loads = roles(KEPT[name]())
    assert loads.count("tl::tma_load(") == 2 and "tl::tma_load(" not in computes
    assert "wgmma" in computes and "wgmma" not in loads
    assert "tl::tma_store(" in computes and "tl::tma_store(" not in loads
    assert "tilescale::signal" not in loads and "tilescale::release" not in loads


def test_waits_of_loads_are_made_by_who_loads():
    computes, loads = roles(KEPT["gather"]())
    assert loads.count("tilescale::wait_by_warp<") == 1 and "tilescale::wait" not in computes
    assert loads.index("tilescale::wait_by_warp<") < loads.index("tl::tma_load(")


@pytest.mark.parametrize(("blocks", "senders", "kept"), [(12, 4, True), (132, 16, False)])
def test_roles_side_by_side_need_room_for_all_tiles(blocks: int, senders: int, kept: bool):
    """One role after the other, the slots of what 16 senders send lie where the loop's tiles were."""
    func = programs.ag_gemm_senders(shape=(4096, 512, 512), blocks=blocks, senders=senders)
    assert is_kept(func) == kept
    assert "tl::tma_load(" in source(func)  # it fits either way


def test_a_grid_of_one_tile_each_has_no_turns():
    assert not is_kept(programs.ag_gemm(shape=SMALL))
