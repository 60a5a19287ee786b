# SPDX-License-Identifier: MIT
"""Additions at peers, waits for several flags, and values of one thread, as CUDA has them."""

import re
import shutil

import pytest

import tilescale.language as T
from tests.cuda.peer_programs import CASES, handled, last_block, summed, tickets, units
from tests.cuda.support import bodies, notes, source
from tests.fuzz.together import joined, renamed
from tilelang_core import compile as stock
from tilescale.backends.cuda.target import target_for
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.hda.current import use_machine

WITHOUT_TMA = [name for name in CASES if not name.endswith("_tma")]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("machine", "devices", "names"),
    [
        pytest.param("h200-sxm-8", 4, list(CASES), marks=pytest.mark.nightly),
        ("a100-sxm-8", 2, ["numbers_bfloat16", "summed_bfloat16_l0", "units", "handled"]),
        ("b200-sxm-8", 2, ["last_block", "summed_float32_l1_tma"]),
    ],
)
def test_text_compiles(machine, devices, names):
    described = Machine.load(machine)
    with use_machine(described):
        texts = [source(CASES[name].make(devices), machine) for name in names]
        text = joined([renamed(text, number) for number, text in enumerate(texts)])
        assert stock.device_code(text, target_for(described))


def test_one_thread_adds_and_all_have_the_result_behind_a_barrier():
    text = bodies(source(tickets(2)))
    order = re.findall(r"__syncthreads|broadcast<|broadcast_value<", text)
    place = order.index("broadcast<")
    assert order[place - 1 : place + 3] == ["__syncthreads", "broadcast<", "__syncthreads", "broadcast_value<"]


def test_an_order_is_one_of_the_whole_unit():
    text = bodies(source(last_block(2)))
    before, after = text.split("tilescale::ACQ_REL", 1)
    assert before.rstrip().rfind("complete_stores") > before.rfind("_peers[(")  # the puts, then the release
    assert after.index("acquired") < after.index("broadcast_value<")


def test_threads_signal_and_wait_without_a_barrier():
    text = bodies(source(units(2)))
    begin, end = text.index("signal_by_thread"), text.rindex("wait_any_by_thread")
    assert "sync" not in text[begin:end]


def test_a_wait_for_any_is_ordered_as_a_wait():
    text = bodies(source(handled(2)))
    assert re.search(r"wait_any<.*\n\s*}\n\s*__syncthreads\(\);\n\s*tilescale::acquired\(\);", text)


@pytest.mark.parametrize(("impl", "said"), [(None, "lsu, element by element"), ("tma", "tma (cp.reduce.async.bulk)")])
def test_the_schedule_says_how_a_tile_is_added(impl, said):
    assert f"T.atomic_add(Y, tile, dst=): {said}" in notes(summed(2, "float32", impl=impl))


def test_tma_adds_whole_tiles_of_shared_memory_alone():
    with pytest.raises(UnsupportedError, match="whole tile in shared memory") as raised:
        source(summed(2, "float32", "l0", "tma"))
    assert any("peer_programs.py" in place.file for place in raised.value.where)


def test_nodes_that_share_no_memory_are_told_so():
    with use_machine("h200-sxm-8x4"):

        @T.prim_func
        def program(X: T.Tensor((4,), "int32")):
            with T.Kernel(node=2, device=8, block=1, threads=32):
                with T.Scale("block"), T.Scale("node") as (rank, size):
                    T.atomic_add(X[0], 1, dst=(rank + 1) % size)

        with pytest.raises(UnsupportedError, match=r"T\.atomic_add") as raised:
            source(program, "h200-sxm-8x4")
    assert any("test_peer_atomics.py" in place.file for place in raised.value.where)
