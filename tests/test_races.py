# SPDX-License-Identifier: MIT
"""Races interleave contenders, keep all rows, and write files of one form; the contenders are correct."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
from tests.cuda.support import notes, source
from tests.race_faults import faults
from tilescale.tuning import chart

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
OLDER = {"corpus", "emulator", "held_out", "many_nodes", "mutants", "overlap_bound", "predictions", "scaling"}
OLDER |= {"persistent_simulated", "rmaracebench", "white_paper_1", "white_paper_2"}
"""Results of scripts with other forms, and those of checks."""


def result_files() -> list[Path]:
    every = sorted((FOLDER / "results").glob("*.json"))
    others = {*OLDER, "upstream_examples", "first_call"}  # examples, and parts of one step
    return [path for path in every if path.stem not in others and "_check" not in path.stem]


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("n*_check.json")), ids=lambda path: path.stem)
def test_checks_between_nodes_passed_as_the_page_says(path: Path):
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert all(row["passed"] == row["ranks"] and not row["failures"] for row in rows if row["part"] != "death")
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    assert f"({len(rows)} checks, `benchmarks/results/{path.name}`)" in page


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """Scripts of the folder by name: no module imports them as a package."""
    places = [str(FOLDER), str(FOLDER / "works")]
    for name in {path.stem for place in places for path in Path(place).glob("*.py")} & sys.modules.keys():
        if not str(sys.modules[name].__file__).startswith(str(FOLDER)):
            del sys.modules[name]  # another test's, from its own folder
    sys.path[:0] = places
    yield __import__
    for place in places:
        sys.path.remove(place)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_loads(scripts: Callable[[str], ModuleType], path: Path):
    """They run on GPUs alone: what they import and cannot find would be noticed late."""
    assert scripts(path.stem).__doc__


@pytest.fixture(scope="module")
def race() -> ModuleType:
    return importlib.import_module("tilescale.tuning.race")


class Alone:
    """A team of one rank."""

    def all_gather(self, obj: Any) -> list[Any]:
        return [obj]


class Pair:
    """A team of which the other rank always sends the same kind of thing: its times are larger by one."""

    def all_gather(self, obj: Any) -> list[Any]:
        if isinstance(obj, dict):
            return [obj, {name: (us + 1, error) for name, (us, error) in obj.items()}]
        return [obj, None]


class Script:
    """A timer with a list of times for each contender, which records the order of calls."""

    def __init__(self, times: dict[str, list[float]]):
        self.times, self.log = {name: iter(values) for name, values in times.items()}, []

    def barrier(self) -> None:
        pass

    def prepare(self, call: Callable[[], str]) -> Callable[[int], float]:
        def group(calls: int) -> float:
            name = call()
            self.log.append(name)
            us = next(self.times[name])
            if us < 0:
                raise RuntimeError("device lost")
            return us

        return group


def heat(race: ModuleType, *names: str, check: dict[str, Callable[[int], None]] | None = None, **more: Any) -> Any:
    def contender(name: str) -> Any:
        def make() -> Any:
            if name == "unbuilt":
                raise NotImplementedError("no such thing")
            return race.Runner(lambda: name, (check or {}).get(name))

        return race.Contender(name, make)

    given = {"work": "work", "shape": (2, 3), "dtype": "float32", "gpus": 1, "mode": "eager", "baseline": names[0]}
    return race.Heat(**given, contenders=[contender(name) for name in names], **more)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_a_result_is_the_median_and_a_ratio_that_of_the_same_rounds(race: ModuleType):
    timer = Script({"base": [100, 200, 400], "fast": [50, 180, 100]})
    base, fast = race.race(heat(race, "base", "fast", flops=1e9), timer, Alone(), rounds=3)
    assert (base["us"], base["spread"], base["ratio"]) == (200, [100, 400], 1)
    assert (fast["us"], fast["spread"], fast["ratio"]) == (100, [50, 180], 0.5)  # of 0.5, 0.9, 0.25
    assert fast["tflops"] == 10 and "gb_s" not in fast


def test_contenders_take_turns_and_each_round_starts_with_another(race: ModuleType):
    timer = Script({name: [1, 1, 1] for name in "abc"})
    race.race(heat(race, *"abc"), timer, Alone(), rounds=3)
    assert timer.log == [*"abc", *"bca", *"cab"]


def test_a_time_is_that_of_the_slowest_rank(race: ModuleType):
    (row,) = race.race(heat(race, "a"), Script({"a": [3, 5, 4]}), Pair(), rounds=3)
    assert (row["us"], row["spread"]) == (5, [4, 6])


def test_a_row_reports_the_largest_of_what_ranks_measure(race: ModuleType):
    class Busier(Alone):
        """The other rank's device is idle for 40 % of the time."""

        def all_gather(self, obj: Any) -> list[Any]:
            return [obj, 40.0 if isinstance(obj, float) else obj]

    runner = race.Runner(lambda: "a", rates={"gib": lambda: 41.5, "idle": lambda: 12.345})
    entry = race.Contender("a", lambda: runner)
    given = race.Heat("work", (2, 3), "float32", 1, "eager", None, [entry])
    (row,) = race.race(given, Script({"a": [1]}), Busier(), rounds=1)
    assert (row["gib"], row["idle"]) == (41.5, 40.0) and "40 % idle" in race.line(row)


def test_who_is_wrong_is_not_timed(race: ModuleType):
    def wrong_at_the_third(seed: int) -> None:
        if seed == 2:
            raise ValueError("wrong: 7 of 9 elements")

    timer = Script({"base": [1, 1], "liar": []})
    base, liar = race.race(heat(race, "base", "liar", check={"liar": wrong_at_the_third}), timer, Alone(), rounds=2)
    assert base["us"] == 1 and liar["us"] is None and liar["ratio"] is None
    assert "7 of 9" in liar["failed"] and timer.log == ["base", "base"]


def test_a_failure_costs_only_its_own_row(race: ModuleType):
    timer = Script({"base": [4, 4, 4], "dies": [1, -1], "good": [2, 2, 2]})
    rows = race.race(heat(race, "base", "unbuilt", "dies", "good"), timer, Alone(), rounds=3)
    assert [row["us"] for row in rows] == [4, None, None, 2]
    assert "no such thing" in rows[1]["failed"] and "device lost" in rows[2]["failed"]
    assert rows[3]["ratio"] == 0.5 and faults({"machine": {}, "versions": {}, "date": "", "rows": rows}) == []


def test_a_failed_baseline_leaves_times_without_ratios(race: ModuleType):
    _, good = race.race(heat(race, "unbuilt", "good"), Script({"good": [2, 2]}), Alone(), rounds=2)
    assert good["us"] == 2 and good["ratio"] is None


def test_a_failure_names_its_rank(race: ModuleType):
    assert race.first_failure([None, "ValueError: x"]) == "rank 1: ValueError: x"
    assert race.first_failure(["ValueError: x"]) == "ValueError: x"
    assert race.first_failure([None, None]) is None


def test_a_check_that_fails_elsewhere_is_the_last_one_here(race: ModuleType):
    class WrongElsewhere:
        """The other rank fails at the second of its steps: it is built, and wrong for the first inputs."""

        asked = 0

        def all_gather(self, obj: Any) -> list[Any]:
            self.asked += 1
            return [obj, "ValueError: wrong" if self.asked == 2 else None]

    seen: list[int] = []
    one = heat(race, "a", check={"a": seen.append})
    (row,) = race.race(one, Script({"a": []}), WrongElsewhere(), rounds=0)
    assert seen == [0], "the next inputs begin with collectives, to which the other rank does not come"
    assert row["failed"] == "rank 1: ValueError: wrong"


def test_who_is_known_to_hang_is_not_tried(race: ModuleType):
    steps: list[tuple[str, str]] = []
    base, hangs = race.race(
        heat(race, "base", "hangs"), Script({"base": [1]}), Alone(), 1, step=lambda *s: steps.append(s),
        out={"hangs": "the run ended"},
    )  # fmt: skip
    assert base["us"] == 1 and hangs["failed"] == "the run ended"
    assert steps == [("base", "build"), ("base", "prepare"), ("base", "race")]


def test_a_step_that_takes_too_long_ends_the_run_and_the_next_one_knows(scripts: Callable, tmp_path: Path):
    steps, path, script = scripts("steps"), tmp_path / "out" / "x.json", tmp_path / "hangs.py"
    lines = f"import sys, time; sys.path.insert(0, {str(FOLDER)!r})", "from pathlib import Path", "import steps"
    run = f"s = steps.Steps(Path({str(path)!r}), 0.5, print)", "s.start('work', 'good', 'build')"
    script.write_text("\n".join([*lines, *run, "s.start('work', 'bad', 'check')", "time.sleep(60)"]))
    ((code, text),) = scripts("jobs").finish([scripts("jobs").start(script, [])], 30)
    assert code == 1 and "hangs.py" in text, "the stacks are shown"
    resumed = steps.Steps(path, 60, print)
    resumed.resume()
    assert resumed.lost == {"work": {"bad": "the run ended in this step: check"}}
    resumed.start("work", "next", "build")
    resumed.end()
    again = steps.Steps(path, 60, print)
    again.resume()
    assert again.lost == resumed.lost, "nobody is blamed for a step that has ended"


def test_kernels_of_every_type_and_one_mode_are_compiled_beforehand(
    race: ModuleType, scripts: Callable, tmp_path: Path
):
    suite, log = scripts("suite"), tmp_path / "log"
    script = tmp_path / "compiles.py"
    script.write_text(f"import sys\nwith open({str(log)!r}, 'a') as file: print(*sys.argv[1:], file=file)")
    heats = [replace(heat(race, "ours"), dtype=kind, mode=mode) for kind in ("a", "b") for mode in ("eager", "graph")]
    for each in heats:
        each.contenders[:] = [replace(c, compile=lambda: None) for c in each.contenders]
    choice = suite.Choice(suite.Suite(script, lambda quick, gpus: heats), "", "", 1, False, tmp_path, 60.0, 1e9)
    suite.compile_beforehand(choice, heats)
    asked = sorted(re.findall("--only (.*?) --contender", log.read_text()))
    assert asked == ["work 2x3 a, 1 GPU, eager", "work 2x3 b, 1 GPU, eager"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_keeps_other_works_and_replaces_its_own(
    race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    days = (datetime(2026, 11, day, tzinfo=timezone.utc) for day in range(1, 9))
    monkeypatch.setattr(race, "datetime", SimpleNamespace(now=lambda zone: next(days)))
    path, one = tmp_path / "results" / "x.json", race.race(heat(race, "a"), Script({"a": [1]}), Alone(), 1)
    race.record(path, one, {"gpu": "G"}, {"torch": "1"})
    other = [row | {"work": "other"} for row in one]
    race.record(path, other, {"gpu": "G"}, {"torch": "1"})
    again = [row | {"us": 7, "spread": [7, 7]} for row in one]
    race.record(path, again, {"gpu": "G"}, {"torch": "1"})
    found = json.loads(path.read_text())
    dated = [row | {"date": f"2026-11-0{day}T00:00:00+00:00"} for day, (row,) in ((2, other), (3, again))]
    assert found["rows"] == dated and found["date"] == dated[-1]["date"] and not faults(found)
    race.record(path, one, {"gpu": "G"}, {"torch": "2"})
    (row,) = json.loads(path.read_text())["rows"]
    assert row == one[0] | {"date": "2026-11-04T00:00:00+00:00"}, "times of other versions are not beside these"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"mode": "fast"}, "mode 'fast'"),
        ({"us": 9.0}, "median lies outside"),
        ({"us": None}, "either a time or why"),
        ({"ratio": 0.5}, "ratio to itself"),
        ({"speed": 1}, "has speed"),
    ],
)
def test_faults_of_a_file_are_found(race: ModuleType, change: dict[str, Any], fault: str):
    (row,) = race.race(heat(race, "a"), Script({"a": [1]}), Alone(), 1)
    whole = {"machine": {}, "versions": {}, "date": "", "rows": [row | change]}
    assert any(fault in found for found in faults(whole))


@pytest.mark.parametrize("path", result_files(), ids=lambda path: path.stem)
def test_committed_results_have_the_form(race: ModuleType, path: Path):
    results = json.loads(path.read_text())
    assert faults(results) == [] and results["rows"]
    assert path.read_text() == race.text_of(results)


def test_a_chart_shows_every_contender(race: ModuleType, scripts: Callable, tmp_path: Path):
    rows = race.race(heat(race, "base", "unbuilt", "good"), Script({"base": [4], "good": [2]}), Alone(), 1)
    rows += race.race(heat(race, "base"), Script({"base": [4]}), Alone(), 1)
    whole = {"machine": {"gpu": "G", "gpus": 2}, "versions": {}, "date": "2026-11-22T03:00:00+00:00", "rows": rows}
    for name in ("x.svg", "x.png"):
        chart.draw(whole, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert chart.measure(rows[2], 2) == 0.5


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("suite", ["asynchrony", "operators"])
def test_works_are_named_once_and_have_their_baselines(scripts: Callable, suite: str, gpus: int, quick: bool):
    heats = list(scripts(suite).heats(quick, gpus))
    assert len({h.title for h in heats}) == len(heats) and (len(heats) > 3 or suite == "operators")
    for each in heats:
        names = [c.name for c in each.contenders]
        assert each.gpus in (gpus, tilescale.init().size) and len(set(names)) == len(names)
        assert each.baseline is None or each.baseline in names


def products(M: int, N: int, K: int, devices: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(M, K, generator=generator).bfloat16() for _ in range(devices)]
    b = [torch.randn(N, K, generator=generator).bfloat16() for _ in range(devices)]
    return a, b


def test_the_phases_program_gathers_and_multiplies(scripts: Callable):
    programs, devices, (m, n, k) = scripts("programs"), 2, (64, 128, 64)
    program = programs.ag_gemm_phases(devices, devices * m, n, k, programs.Tiling(32, 64, 32, 2))
    a, b = products(m, n, k, devices)
    outs = [torch.full((devices, m, n), torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
    tilescale.emulate(program, [[x[None].clone(), y, c] for x, y, c in zip(a, b, outs, strict=True)])
    for y, c in zip(b, outs, strict=True):
        torch.testing.assert_close(c.double(), torch.stack(a).double() @ y.double().T, rtol=2**-7, atol=1e-3)


OVERLAPPED_GATHERS = {
    "queue": lambda p, *shape: p.ag_gemm_queue(*shape, p.Tiling(32, 64, 32, 2), 32),
    "queue, in turns": lambda p, *shape: p.ag_gemm_queue(*shape, p.Tiling(32, 64, 32, 2), 32, 3),
    "queue, warpgroups apart": lambda p, *shape: p.ag_gemm_queue(
        *shape, p.Tiling(32, 64, 32, 2), 32, product=p.multiply_by_warpgroups
    ),
    "senders": lambda p, *shape: p.ag_gemm_senders(*shape, p.Tiling(32, 64, 32, 2), 32, 2),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("way", OVERLAPPED_GATHERS)
def test_overlapped_gathers_multiply_what_has_arrived(scripts: Callable, way: str, devices: int):
    rows, n, k = 64, 128, 128
    program = OVERLAPPED_GATHERS[way](scripts("programs"), devices, devices * rows, n, k)
    a, b = products(rows, n, k, devices)
    places = [torch.full((devices, rows, k), torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
    for rank, place in enumerate(places):
        place[rank] = a[rank]
    outs = [torch.full((devices, rows, n), torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
    tilescale.emulate(program, [list(given) for given in zip(places, b, outs, strict=True)])
    for y, c in zip(b, outs, strict=True):
        torch.testing.assert_close(c.double(), torch.stack(a).double() @ y.double().T, rtol=2**-7, atol=1e-3)


def test_senders_and_tiles_have_the_same_place(scripts: Callable):
    """Blocks that send, or compute a tile: the tiles of both branches reuse the memory of the loop's loads."""
    programs = scripts("programs")
    func = programs.ag_gemm_senders(2, 8192, 3584, 8192, programs.Tiling(), 512, 16)
    assert "load -> compute: a, b; 4 stages, 1 T.wait by load" in notes(func)
    text = source(func)
    begins = dict(re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);", text))
    assert begins["out"] == begins["sent"] == begins["b"] == "0"


OVERLAPPED_SCATTERS = {
    "queue": lambda p, *shape: p.gemm_rs_queue(*shape, p.Tiling(32, 64, 32, 2), 32),
    "queue in turns": lambda p, *shape: p.gemm_rs_queue(*shape, p.Tiling(32, 64, 32, 2), 32, 3),
    "direct": lambda p, *shape: p.gemm_rs_direct(*shape, p.Tiling(32, 64, 32, 2), 3),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("way", OVERLAPPED_SCATTERS)
def test_overlapped_scatters_add_up_what_arrives(scripts: Callable, way: str, devices: int):
    rows, n, k = 64, 128, 64
    program = OVERLAPPED_SCATTERS[way](scripts("programs"), devices, devices * rows, n, k)
    a, b = products(devices * rows, n, k, devices)
    outs = [torch.full((rows, n), torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
    given = [[x.view(devices, rows, k).clone(), y, c] for x, y, c in zip(a, b, outs, strict=True)]
    tilescale.emulate(program, given)
    want = sum(x.double() @ y.double().T for x, y in zip(a, b, strict=True)).chunk(devices)
    for c, expected in zip(outs, want, strict=True):
        torch.testing.assert_close(c.double(), expected, rtol=2**-6, atol=0.3)  # parts are rounded before their sum


def test_clusters_multiply(scripts: Callable):
    m, n, k = 256, 512, 192
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    c = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    tilescale.emulate(scripts("one_gpu").by_clusters(m, n, k), [a, b, c])
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2**-7, atol=1e-3)


def test_plain_attention_is_causal(scripts: Callable):
    tokens, heads, of_keys, dim = 64, 2, 1, 16
    q, k, v = (torch.randn(1, tokens, n, dim).bfloat16() for n in (heads, of_keys, of_keys))
    out = torch.full_like(q, torch.nan)
    tilescale.emulate(scripts("plain_attention").flash_attention(tokens, heads, of_keys, dim, tile=32), [q, k, v, out])
    want, bound = scripts("long_sequences").attended(
        q[0].transpose(0, 1), k[0, :, 0], v[0, :, 0], torch.ones(tokens, tokens, dtype=torch.bool).tril()
    )
    assert bool(((out[0].transpose(0, 1).float() - want).abs() <= bound).all())


def test_puts_reach_the_next_device(scripts: Callable):
    programs, devices = scripts("programs"), 3
    xs = [torch.randn(64, 128).bfloat16() for _ in range(devices)]
    ys = [torch.full((64, 128), torch.nan, dtype=torch.bfloat16) for _ in range(devices)]
    program = programs.put(devices, 64, 128, 2, "tma", tile=(32, 64))
    tilescale.emulate(program, [list(pair) for pair in zip(xs, ys, strict=True)])
    for rank, y in enumerate(ys):
        assert torch.equal(y, xs[rank - 1])


def test_tiles_of_a_raster_are_all_of_them(scripts: Callable):
    raster = scripts("programs").raster
    for rows, columns in (16, 14), (8, 3), (12, 5), (7, 2), (1, 4):
        found = {raster(number, rows, columns) for number in range(rows * columns)}
        assert found == {(m, n) for m in range(rows) for n in range(columns)}


# -- other jobs --------------------------------------------------------------------------------------------------------


def test_a_job_is_timed_when_asked(scripts: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "served.py"
    lines = f"import sys; sys.path.insert(0, {str(FOLDER)!r})", "import jobs", "print('starting')"
    script.write_text("\n".join([*lines, "jobs.serve(lambda calls: 1.5 / (5 - calls))"]))
    served = scripts("jobs").Served(script, [])
    assert [served.group(calls) for calls in (2, 4)] == [0.5, 1.5]
    with pytest.raises(RuntimeError, match="ended with code 1"):
        served.group(5)


def test_a_job_of_its_own_is_no_rank(scripts: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    script = tmp_path / "alone.py"
    script.write_text("import os, sys; print(os.environ.get('RANK')); sys.exit(int(sys.argv[1]))")
    jobs = scripts("jobs")
    assert jobs.finish([jobs.start(script, [code]) for code in "03"], 60) == [(0, "None\n"), (3, "None\n")]


def test_a_job_that_takes_too_long_is_ended(scripts: Callable, tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text("print('here', flush=True); import time; time.sleep(600)")
    ((code, text),) = scripts("jobs").finish([scripts("jobs").start(script, [])], 2)
    assert code < 0 and text == "here\n"
