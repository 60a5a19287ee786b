# SPDX-License-Identifier: MIT
"""Programs of the examples: errors with the line, and independence of a launch from the previous one."""

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tilescale
from tests.halves import every_second_at_night
from tests.ladder import NUMBERED, load
from tests.test_examples import RUNS, USUAL
from tilescale.errors import DeadlockError, RaceError, ShapeError, TileScaleError, UnknownLevelError
from tilescale.program.model import Program, Sequence

REFUSED: dict[str, tuple[int, Callable[[ModuleType], Any], str]] = {
    "shared dimension": (8, lambda m: m.tp_gemm(3, 128, 128, 128), "dimension 1 of (128, 128) has 128 elements"),
    "rows of clusters": (10, lambda m: m.cluster_gemm(3, 128, 96, 96), "dimension 0 of (128, 96) has 128 elements"),
    "rows of roles": (11, lambda m: m.loader_and_workers(3, 128, 96, 192), "dimension 0 of (128, 192) has 128"),
    "rows of senders": (12, lambda m: m.worker_and_sender(3, 128, 96, 96), "dimension 0 of (128, 96) has 128 elements"),
    "heads": (14, lambda m: m.ulysses(3, 8, 192, 64), "T.all_to_all over 3 units from (8, 3, 64, 64)"),
}

PARTS: dict[str, tuple[int, Callable[[ModuleType], Any], str]] = {
    "keys": (9, lambda m: m.cp_mla(2, 1, 64, 250, 512, 64), "seq=250 is not made of whole parts of 256; 256 would be"),
    "heads": (9, lambda m: m.cp_mla(2, 1, 96, 256, 512, 64), "heads=96 is not made of whole parts of 64; 128 would be"),
    "roles": (11, lambda m: m.loader_and_workers(2, 64, 64, 64), "K=64 is not made of whole parts of 128; 128 would"),
    "a ring": (13, lambda m: m.ring_attention(3, 2, 256, 64), "tokens=256 is not made of whole parts of 192; 384"),
    "tokens": (14, lambda m: m.ulysses(2, 8, 200, 64), "tokens=200 is not made of whole parts of 128; 256 would be"),
    "panels": (17, lambda m: m.by_panels(2, 2, 64, 64, 100), "K=100 is not made of whole parts of"),
    "chunks": (22, lambda m: m.overlapped(2, 256, 64, 64, chunk=96), "chunk=96 is not made of whole parts of 64; 128"),
    "sends": (23, lambda m: m.overlapped(2, 256, 64, 64, chunk=32), "chunk=32 is not made of whole parts of 64; 64"),
    "reads": (17, lambda m: m.by_reads(2, 2, 64, 64, 100), "K=100 is not made of whole parts of"),
}


@pytest.mark.parametrize("name", PARTS)
def test_extents_that_are_no_whole_parts_are_refused(name: str):
    number, make, message = PARTS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make(load(NUMBERED[number]))


@pytest.mark.parametrize("name", REFUSED)
def test_shares_that_do_not_divide_are_refused(name: str):
    number, make, message = REFUSED[name]
    with pytest.raises(ShapeError) as caught:
        make(load(NUMBERED[number]))
    assert message in caught.value.message
    if name != "heads":
        assert "do not divide among 3 units" in caught.value.message
    assert caught.value.where[0].file == str(NUMBERED[number])


@pytest.mark.parametrize(
    ("number", "level"), [(8, "warpgroup"), (9, "warpgroup"), (10, "cta_cluster"), (11, "warpgroup"), (13, "warpgroup")]
)
def test_a_level_that_the_machine_lacks_is_named(number: int, level: str):
    with pytest.raises(UnknownLevelError, match=f"machine a100-sxm-8 has no level '{level}'"):
        load(NUMBERED[number]).main(["--machine=a100-sxm-8"], standalone_mode=False)


def test_more_devices_than_the_machine_has():
    with pytest.raises(TileScaleError, match="16 units of level 'device'"):
        load(NUMBERED[9]).main(["--devices=16"], standalone_mode=False)


@pytest.mark.parametrize("number", every_second_at_night(NUMBERED))
def test_again_with_the_same_buffers_in_other_orders(number: int, monkeypatch: pytest.MonkeyPatch):
    """A launch on other inputs goes before each: its results in the tensors must not be seen, in any order of units."""
    example, launches = load(NUMBERED[number]), []

    def twice(program: Any, args: list[list[torch.Tensor]]) -> None:
        given = {id(x): (x, x.clone()) for row in args for x in row}
        for x, _ in given.values():
            x.copy_(x.flip(0))
        first = tilescale.emulate(program, args, schedule_seed=1)
        for x, before in given.values():
            x.copy_(before)
        second = tilescale.emulate(program, args, schedule_seed=2)
        assert not first.redundant_waits and not second.redundant_waits
        launches.append(program)

    monkeypatch.setattr(example.common, "run", twice)
    example.main([*RUNS.get(number, USUAL)[2].split(), "--seed=5"], standalone_mode=False)
    assert launches


def test_one_credit_for_both_places_of_a_ring_is_a_race(tmp_path: Path):
    """The example's warning: signals of fast readers count for those of a slow one, whose tile is overwritten."""
    text = NUMBERED[13].read_text(encoding="utf-8")
    for two, one in (
        ('free[there, h, i], ">=", (step + 1) // 2 * readers', 'free[0, h, i], ">=", step * readers'),
        ("free[here, h, i]", "free[0, h, i]"),
        ("free[step % 2, h, t]", "free[0, h, t]"),
    ):
        assert text.count(two) == 1
        text = text.replace(two, one)
    changed = tmp_path / NUMBERED[13].name
    changed.write_text(text, encoding="utf-8")
    with pytest.raises(RaceError, match=r"^places\[") as caught:
        load(changed).main(["--devices=3", "--size=384"], standalone_mode=False)
    lines = [text.splitlines()[place.line - 1].strip() for place in caught.value.where]
    assert lines[0].startswith("T.copy(places[here,")  # a sender, which is one of the readers
    assert lines[1].startswith("T.copy(tile, places[there,")


@pytest.fixture
def launched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is launched twice in a row on the same workspaces, without a barrier in between.

    Except those with flags of the call: they are zero when a call begins, which is a barrier.
    """
    emulate = importlib.import_module("tilescale.backends.emulator.emulate")
    taken_apart = emulate.analyse

    def twice(*given: Any) -> Program:
        program = taken_apart(*given)
        if any(launch.flags for launch in program.launches):
            return program
        return replace(program, body=Sequence((program.body, program.body)))

    monkeypatch.setattr(emulate, "analyse", twice)


def in_several_orders(path: Path, given: list[str], seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in the default order of units and in those of some seeds, without checking its results."""
    example, emulate = load(path), tilescale.emulate
    monkeypatch.setattr(example.common, "compare", lambda *_: None)
    for seed in (None, *range(seeds)):
        ordered = functools.partial(emulate, schedule_seed=seed)
        monkeypatch.setattr(tilescale, "emulate", ordered)
        example.main(given, standalone_mode=False)


@pytest.mark.parametrize("number", every_second_at_night(NUMBERED, first=0))
@pytest.mark.usefixtures("launched_twice")
def test_a_launch_leaves_nothing_on_its_way_to_the_next(number: int, monkeypatch: pytest.MonkeyPatch):
    """No races, no deadlocks: a late arrival, or a late read, would collide with the next launch."""
    in_several_orders(NUMBERED[number], RUNS.get(number, USUAL)[2].split(), 1, monkeypatch)


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (2, "T.barrier()"),
        (4, "T.barrier()  # every inbox is free, every flag cleared"),
        (7, "T.barrier()  # no device reads the inbox of the previous launch, every flag is cleared"),
        (15, 'T.wait(reduced[block + iteration * blocks], ">=", 1)'),
        (16, "T.barrier()  # no device reads the blocks of the previous launch, every flag is cleared"),
        (18, "T.clear(arrived)"),
        (20, "T.clear(free)"),
        (20, "T.barrier()  # every device knows of the last free slots"),
        (21, "T.barrier()  # no device reads the A and C of the previous launch, all flags are cleared"),
    ],
)
@pytest.mark.usefixtures("launched_twice")
def test_a_handshake_between_launches_counts(number: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without it the second launch comes to what the first still uses, or sees its flags."""
    text = NUMBERED[number].read_text(encoding="utf-8")
    assert f"{line}\n" in text
    broken = tmp_path / NUMBERED[number].name
    broken.write_text("pass\n".join(text.rsplit(f"{line}\n", 1)), encoding="utf-8")
    with pytest.raises((RaceError, DeadlockError)):
        in_several_orders(broken, RUNS.get(number, USUAL)[2].split(), 3, monkeypatch)


def test_a_sender_hides_the_network_behind_the_next_product():
    devices, turns, steps = 4, 4, 8
    program = load(NUMBERED[12]).worker_and_sender(devices, 1024, 1024, 64 * steps, blocks=8)
    spans = tilescale.emulate(program, data=False).timeline.spans

    def times(name: str, warpgroup: int) -> list[tuple[float, float]]:
        unit = f"device 0, block 0, warpgroup {warpgroup}"
        return sorted((span.begin_s, span.end_s) for span in spans if (span.name, span.unit) == (name, unit))

    puts, products = times("put", 0), times("gemm", 1)
    assert (len(puts), len(products)) == (devices * turns, steps * turns)
    for turn in range(turns):
        assert puts[devices * turn][0] >= products[steps * (turn + 1) - 1][1]
        if turn + 1 < turns:
            assert puts[devices * (turn + 1) - 1][1] < products[steps * (turn + 2) - 1][1]


@pytest.mark.parametrize(("devices", "sent"), [(1, "float32"), (2, "float32"), (2, "float16")])
def test_attention_merges_what_blocks_of_a_device_made_of_their_keys(devices: int, sent: str):
    module, attention = load(NUMBERED[9]), load(NUMBERED[9].parent / "attention.py")
    batch, heads, seq, dim = 2, 64, devices * 256, 64
    shapes = (batch, heads, dim), (batch, heads, dim), (batch, seq, 1, dim), (batch, seq, 1, dim)
    rng = torch.Generator().manual_seed(devices)
    q, q_pe, kv, k_pe = (torch.randn(shape, generator=rng).half() for shape in shapes)
    outputs = [torch.full((batch, heads, dim), torch.nan) for _ in range(devices)]
    shards = zip(kv.chunk(devices, 1), k_pe.chunk(devices, 1), outputs, strict=True)
    args = [[q, q_pe, k.contiguous(), pe.contiguous(), output] for k, pe, output in shards]
    tilescale.emulate(module.cp_mla(devices, batch, heads, seq, dim, dim, splits=2, sent=sent), args)
    want, bound = attention.reference(torch.cat([q, q_pe], -1), torch.cat([kv, k_pe], -1)[:, :, 0], kv[:, :, 0])
    for output in outputs:
        assert bool(((output - want).abs() <= bound).all())
