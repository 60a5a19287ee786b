# SPDX-License-Identifier: MIT
"""Programs of the examples on shapes, routings and arrangements that their command lines do not reach."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch

import tilescale
from tests.comm.conftest import command, run_words
from tests.halves import every_second_at_night
from tests.ladder import NUMBERED, load


def example(number: int) -> ModuleType:
    return load(NUMBERED[number])


def values(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blanks(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.full(shape, torch.nan) for _ in range(count)]


def parts(whole: torch.Tensor, rows: int, cols: int) -> list[torch.Tensor]:
    """The blocks of a matrix, row by row."""
    return [part.contiguous() for row in whole.chunk(rows) for part in row.chunk(cols, 1)]


def assert_product(found: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, rows: int = 1, cols: int = 1) -> None:
    """Blocks equal those of the float64 result, within rounding."""
    bound = 2.0**-24 * a.shape[1] * (a.double().abs() @ b.double().abs())
    wanted = parts(a.double() @ b.double(), rows, cols)
    for part, want, most in zip(found, wanted, parts(bound, rows, cols), strict=True):
        assert ((part.double() - want).abs() <= most).all()


FORMS = {
    3: ("collective by_hand", [(4, 256, 256), (4, 2048, 2048)]),
    4: ("collective one_shot two_shot", [(4, 128, 128), (4, 4096, 512)]),
    5: ("collective by_hand", [(4, 1024, 512), (4, 4096, 512)]),
    6: ("phases tile_by_tile", [(4, 1024, 1024, 1024), (4, 2048, 2048, 2048)]),
    7: ("phases tile_by_tile", [(4, 1024, 1024, 1024)]),
    15: ("phases tile_by_tile", [(4, 1024, 1024, 1024)]),
    19: ("phases by_hand", [(2, 4, 128, 128), (2, 4, 4096, 512)]),
}
"""Example -> its forms, and the arguments for which its docstring gives times."""


@pytest.mark.parametrize("number", every_second_at_night(FORMS))
def test_the_times_by_which_an_example_says_which_form_wins(number: int):
    names, cases = FORMS[number]
    said = example(number).__doc__.partition("When it wins:")[2].partition("\n\n")[0]
    for given in cases:
        with tilescale.use_machine("h200-sxm-8x4" if number == 19 else "h200-sxm-8"):
            times = [
                tilescale.emulate(getattr(example(number), name)(*given), data=False).time_us for name in names.split()
            ]
        assert re.search(r"\b.*?\b".join(map(rounded, times)), said, re.DOTALL), (given, times)


def rounded(us: float) -> str:
    return re.escape(f"{us:.1f}" if us < 100 else f"{us:.0f}")


# -- GEMMs over devices
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "m", "n", "k", "blocks"), [(2, 65, 100, 72, 3), (3, 130, 64, 96, 16), (5, 8, 8, 80, 1)]
)
def test_gemm_all_reduce_gives_all_devices_the_same_bits(devices: int, m: int, n: int, k: int, blocks: int):
    a, b, results = values(1, m, k), values(2, k, n), blanks(devices, m, n)
    program = example(15).tile_by_tile(devices, m, n, k, blocks)
    tilescale.emulate(program, list(zip(parts(a, 1, devices), parts(b, devices, 1), results, strict=True)))
    assert_product(results[:1], a, b)
    assert all(torch.equal(c, results[0]) for c in results)


@pytest.mark.parametrize(("side", "rows", "cols", "inner"), [(1, 70, 30, 40), (2, 65, 130, 72), (3, 24, 80, 33)])
def test_cannon_on_odd_blocks(side: int, rows: int, cols: int, inner: int):
    m, n, k = side * rows, side * cols, side * inner
    a, b, results = values(1, m, k), values(2, k, n), blanks(side * side, rows, cols)
    args = list(zip(parts(a, side, side), parts(b, side, side), results, strict=True))
    with tilescale.use_machine("gb200-nvl72"):
        tilescale.emulate(example(16).cannon(side, m, n, k), args)
    assert_product(results, a, b, side, side)


@pytest.mark.parametrize("kind", ["by_panels", "by_reads"])
@pytest.mark.parametrize(("P", "Q", "rows", "cols"), [(1, 5, 70, 24), (4, 1, 8, 130), (2, 3, 65, 72), (4, 2, 33, 40)])
def test_summa_on_every_rectangle(kind: str, P: int, Q: int, rows: int, cols: int):
    m, n, k = P * rows, Q * cols, 2 * math.lcm(P, Q) * 32
    a, b, results = values(1, m, k), values(2, k, n), blanks(P * Q, rows, cols)
    program = getattr(example(17), kind)(P, Q, m, n, k)
    tilescale.emulate(program, list(zip(parts(a, P, Q), parts(b, P, Q), results, strict=True)))
    assert_product(results, a, b, P, Q)


def test_summa_by_reads_moves_more_than_by_panels():
    """A device needs a panel once, but each of its blocks reads it: here two blocks in each direction."""
    side, size = 2, 256
    moved = {}
    for kind in "by_panels", "by_reads":
        args = [[values(r, 128, 128), values(r, 128, 128), *blanks(1, 128, 128)] for r in range(4)]
        report = tilescale.emulate(getattr(example(17), kind)(side, side, size, size, size), args)
        moved[kind] = sum(a.received for a in report.activity)
    assert moved == {"by_panels": 4 * 2 * 128 * 128 * 2, "by_reads": 2 * 4 * 2 * 128 * 128 * 2}


# -- mixture of experts ------------------------------------------------------------------------------------------------


def all_to_one(choice: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.full_like(choice, experts - 1)


def all_different(choice: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.arange(choice.numel(), dtype=torch.int32).reshape(choice.shape) % experts


def only_at_home(choice: torch.Tensor, experts: int) -> torch.Tensor:
    return choice % 2


@pytest.mark.parametrize("route", [all_to_one, all_different, only_at_home])
@pytest.mark.parametrize(("devices", "tokens", "capacity"), [(1, 33, 66), (3, 37, 7), (4, 1, 1), (2, 70, 64)])
def test_experts_get_what_their_capacity_holds(
    route: Callable[[torch.Tensor, int], torch.Tensor], devices: int, tokens: int, capacity: int
):
    """Odd numbers of tokens, experts without tokens or with all, fewer slots than a tile or partial tiles."""
    module, width, hidden, top_k = example(18), 40, 72, 2
    experts = 2 * devices
    weights = values(9, experts, width, hidden)
    args, wanted = [], []
    for device, shard in enumerate(weights.chunk(devices)):
        x, share = values(device, tokens, width), values(device, tokens, top_k, dtype=torch.float32).abs()
        chosen = route(torch.randint(experts, (tokens, top_k), dtype=torch.int32), experts)
        args.append([x, chosen, share, shard, *blanks(1, tokens, hidden)])
        wanted.append(module.reference(x, chosen, share, weights, capacity))
    tilescale.emulate(module.moe(devices, tokens, width, hidden, experts, top_k, capacity), args)
    for (*_, found), (want, magnitude, _) in zip(args, wanted, strict=True):
        assert ((found.double() - want).abs() <= 2.0**-24 * width * top_k * magnitude + 1e-30).all()
    chosen_most = max(int(torch.bincount(a[1].flatten()).max()) for a in args)
    assert any(dropped for *_, dropped in wanted) == (chosen_most > capacity)


# -- nodes, cores, vaults ----------------------------------------------------------------------------------------------


def test_nodes_give_all_devices_the_same_bits():
    with tilescale.use_machine("h200-sxm-8x4"):
        tensors = [values(r, 96, 40, dtype=torch.float32) for r in range(12)]
        total = sum(x.double() for x in tensors)
        tilescale.emulate(example(19).by_hand(4, 3, 96, 40), [[x] for x in tensors])
    assert all(torch.equal(x, tensors[0]) for x in tensors)
    torch.testing.assert_close(tensors[0].double(), total, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("side", range(1, 12))
def test_neighbours_on_the_folded_ring_are_two_hops_apart(side: int):
    module = example(20)
    place = {position: module.place_on_ring(position, side) for position in range(side)}
    assert sorted(place.values()) == list(range(side))
    for a, b in itertools.permutations(range(side), 2):
        if (place[b] - place[a]) % side == 1:
            assert abs(a - b) <= 2


@pytest.mark.parametrize(("P", "Q", "m", "cols", "inner"), [(1, 1, 5, 7, 9), (3, 2, 33, 40, 24), (2, 5, 16, 17, 8)])
def test_vaults_pass_on_rows_and_sums(P: int, Q: int, m: int, cols: int, inner: int):
    a, b = values(1, m, P * inner), values(2, P * inner, Q * cols)
    entering = [left if q == 0 else left * torch.nan for left in parts(a, 1, P) for q in range(Q)]
    sums = [torch.zeros(m, cols) for _ in range(P * Q)]
    with tilescale.use_machine("stacked-3d"):
        program = example(21).weights_stay(P, Q, m, Q * cols, P * inner)
        tilescale.emulate(program, list(zip(entering, parts(b, P, Q), sums, strict=True)))
    assert_product(sums[-Q:], a, b, 1, Q)
    for vault, passed in enumerate(entering):
        assert torch.equal(passed, parts(a, 1, P)[vault // Q])


# -- time --------------------------------------------------------------------------------------------------------------


def waited_us(report: tilescale.Report, name: str) -> float:
    return sum(span.end_s - span.begin_s for span in report.timeline.spans if span.name == name) * 1e6


def test_one_iteration_behind_the_parts_have_arrived(tmp_path: Path):
    """Reduced in the iteration in which it is multiplied, a tile is waited for; one iteration later it has arrived."""
    text = NUMBERED[15].read_text(encoding="utf-8")
    for behind, at_once in (
        (
            "iteration > 0 and (block + iteration - 1) % size == rank",
            "iteration < iterations and (block + iteration) % size == rank",
        ),
        ("t = block + (iteration - 1) * blocks", "t = block + iteration * blocks"),
    ):
        assert text.count(behind) == 1
        text = text.replace(behind, at_once)
    changed = tmp_path / NUMBERED[15].name
    changed.write_text(text, encoding="utf-8")
    later, now = (
        tilescale.emulate(load(path).tile_by_tile(2, 256, 256, 1024, blocks=4), data=False)
        for path in (NUMBERED[15], changed)
    )
    assert waited_us(later, "wait for arrived") < 0.5 * waited_us(now, "wait for arrived")
    assert later.time_us < now.time_us


def test_shifts_round_a_folded_ring_take_less_time():
    """With small blocks the longest hop of a plain ring, over seven of eight cores, takes longer than a GEMM."""
    module, times = example(20), []
    with tilescale.use_machine("wafer-mesh"):
        for stepped in (module.stepped, lambda position, by, side: (position + by // 2 + side) % side):
            module.stepped = stepped
            times.append(tilescale.emulate(module.mesh_gemm(8, 16, 16, 16), data=False).time_us)
    folded, plain = times
    assert folded < 0.9 * plain


# -- use ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "given", "message"),
    [
        (16, "--devices=3", "takes a square number of devices, not 3: --devices=4, or 17_summa.py"),
        (16, "--devices=8", "takes a square number of devices, not 8: --devices=9, or 17_summa.py"),
        (17, "--devices=6 --rows=4", "6 devices do not make 4 equal rows: give --rows a divisor of 6"),
        (18, "--devices=1 --top-k=3", "a token cannot choose 3 of 2 experts: lower --top-k or raise --experts"),
        (19, "--devices=9 --nodes=4", "9 devices do not divide among 4 nodes: give a multiple of 4"),
        (20, "--devices=12", "12 cores are no square: give --devices 9"),
    ],
)
def test_arrangements_that_do_not_exist(number: int, given: str, message: str):
    with pytest.raises(click.UsageError, match=re.escape(message)):
        example(number).main(given.split(), standalone_mode=False)


@pytest.mark.parametrize("number", [16, 20])
def test_blocks_too_large_for_a_core_are_refused(number: int):
    with pytest.raises(tilescale.errors.TileScaleError) as caught:
        example(number).main(["--size=512", "--machine=wafer-mesh", "--devices=16"], standalone_mode=False)
    wanted = {16: "no level 'device'", 20: "layer 'l0' (core SRAM) of 'wafer-mesh' has 40 KiB for one tile"}
    assert wanted[number] in caught.value.message


def test_as_a_job_on_the_machine_of_the_example():
    ranks = 4
    words = [*command("torchrun", ranks), str(NUMBERED[20]), "--size=48"]
    done = run_words(words, TILESCALE_TIMEOUT_S="60", TILESCALE_EMULATE="1")
    assert done.code == 0, done.output
    for rank in range(ranks):
        assert re.search(rf"device {rank}: largest error", done.output), done.output
