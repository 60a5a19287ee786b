# SPDX-License-Identifier: MIT
"""The ladder of examples/distributed: every rung emulated on several numbers of devices, a few as jobs of ranks."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tilescale
from tests.comm.conftest import command, run_words
from tests.halves import every_second_at_night
from tests.ladder import EXAMPLES, FOLDER, NUMBERED, load

USUAL = ["--devices=1 --size=64", "--devices=2 --size=128", "--devices=3 --size=96", "--devices=4 --size=200"]
USUAL += ["--devices=8 --size=128"]
LARGE, LARGE_SIZES = "--machine=gb200-nvl72 --devices=9", {18: 128, 24: 40}  # of others 144: all can be shared out
RUNS: dict[int, list[str]] = {
    16: [USUAL[0], USUAL[3], "--devices=9 --size=100 --machine=gb200-nvl72"],
    18: [*USUAL[:3], "--devices=4 --size=256", USUAL[4]],
    19: [*USUAL[1::2], "--devices=12 --nodes=4 --size=100", "--devices=3 --nodes=1 --size=96"],
    20: ["--devices=1 --size=56", "--devices=4 --size=100", "--devices=9 --size=96", "--devices=64 --size=72"],
    21: [*USUAL[:2], "--devices=35 --size=70", *USUAL[2:]],
    24: [*USUAL[:2], "--devices=3 --size=40", "--devices=4 --size=72", "--devices=8 --size=40"],
}
"""Numbers of devices that an example takes, where these are not the usual ones."""
ELSEWHERE: dict[int, tuple[str, str]] = {
    19: ("--devices=12 --nodes=3", "extends: h200-sxm-8x4\nlevels: {node: {count: 3}}"),
    20: ("--devices=25", "extends: wafer-mesh\nlevels: {core: {count: 25}}\nnetworks: {fabric: {dims: [5, 5]}}"),
    21: ("--devices=6", "extends: stacked-3d\nlevels: {vault: {count: 6}}\nnetworks: {mesh: {dims: [2, 3]}}"),
}
"""For an example of another kind of machine: how to run it on one that is described here."""
VERDICT = re.compile(r"largest error \S+, rounding allows")


def verdicts(path: Path, capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    """Verdicts that an example prints, one for every run."""
    load(path).main([*args], standalone_mode=False)
    shown = capsys.readouterr().out
    found = VERDICT.findall(shown)
    assert len(found) == len(re.findall(r"^emulated \S+ in", shown, re.MULTILINE))
    return found


def programs(path: Path) -> int:
    """Number of tile programs of an example."""
    return sum(
        isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "T.prim_func" for d in node.decorator_list)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_the_ladder_has_no_gap():
    assert list(NUMBERED) == list(range(1, len(EXAMPLES) + 1))
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in table for path in EXAMPLES)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_explained(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    if path in EXAMPLES:
        assert "The idea:" in docstring and "Things to try:" in docstring
        assert 'if __name__ == "__main__":\n    main()' in text


def runs(number: int) -> list[Any]:
    """One device, and the largest number of them, the one before at night; those between are run in several orders
    elsewhere.
    """
    first, *_, second, last = RUNS.get(number, USUAL)
    return [(number, first), pytest.param(number, second, marks=pytest.mark.nightly), (number, last)]


@pytest.mark.parametrize(("number", "given"), [run for number in NUMBERED for run in runs(number)])
def test_emulated(number: int, given: str, capsys: pytest.CaptureFixture[str]):
    done = verdicts(NUMBERED[number], capsys, *given.split(), "--seed=7")
    assert len(done) >= programs(NUMBERED[number]) >= 1


@pytest.mark.parametrize("number", every_second_at_night(NUMBERED))
def test_on_another_machine(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It has more devices than the default machine: the programs are traced for the machine that is asked for."""
    given = f"{LARGE} --size={LARGE_SIZES.get(number, 144)}"
    if number in ELSEWHERE:
        machine = tmp_path / "another.yaml"
        machine.write_text(ELSEWHERE[number][1], encoding="utf-8")
        given = f"{ELSEWHERE[number][0]} --machine={machine} --size=60"
    assert verdicts(NUMBERED[number], capsys, *given.split())


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("number", [8, 9])
def test_programs_of_the_white_paper_on_machines_of_their_size(
    number: int, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    machine = tmp_path / f"h200-sxm-{devices}.yaml"
    changed = f"extends: h200-sxm-8\ntitle: {devices} H200\nlevels: {{device: {{count: {devices}}}}}\n"
    machine.write_text(changed, encoding="utf-8")
    path = NUMBERED[number]
    assert verdicts(path, capsys, f"--devices={devices}", "--size=512", f"--machine={machine}")
    with pytest.raises(tilescale.errors.LaunchError, match=f"{2 * devices} units of level 'device'"):
        load(path).main([f"--devices={2 * devices}", "--size=512", f"--machine={machine}"], standalone_mode=False)


def test_blocks_that_do_not_fit_a_core():
    with pytest.raises(tilescale.errors.AllocationTooLargeError, match=r"of core SRAM, wafer-mesh has 40 KiB"):
        load(NUMBERED[20]).main(["--devices=4", "--size=200"], standalone_mode=False)


def test_default_is_four_devices_or_what_the_example_says(capsys: pytest.CaptureFixture[str]):
    for path, devices in (NUMBERED[1], 4), (NUMBERED[8], 8):
        load(path).main(["--size=64"], standalone_mode=False)
        assert f"device {', '.join(map(str, range(devices)))}:" in capsys.readouterr().out


def test_the_tensor_parallel_product_shows_its_phases(capsys: pytest.CaptureFixture[str]):
    load(NUMBERED[8]).main(["--size=64"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "each block" in shown and "gemm" in shown and "allreduce(C) between devices" in shown


def test_a_timeline_is_drawn_for_each_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    verdicts(NUMBERED[7], capsys, "--size=64", f"--timeline={tmp_path / 'run.svg'}")
    verdicts(NUMBERED[1], capsys, "--size=64", f"--timeline={tmp_path / 'run.json'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-2.svg", "run.json", "run.svg"]
    assert (tmp_path / "run.json").read_text(encoding="utf-8").startswith('{"traceEvents":')


FORMS = {number: text for number, path in NUMBERED.items() if "forms.times(" in (text := path.read_text("utf-8"))}
FORM = re.compile(r'^def (?!main)\w+\((?:devices|nodes|P): .*:\n    """', re.MULTILINE)
QUICK = 3, 4


def test_examples_with_forms_of_one_program_show_their_times():
    others = {24: "one with capacities, one with offsets"}
    several = {n for n, path in NUMBERED.items() if len(FORM.findall(path.read_text("utf-8"))) > 1}
    assert several - others.keys() == FORMS.keys()


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in QUICK else pytest.mark.nightly) for number in FORMS]
)
def test_an_example_says_when_which_form_wins(number: int, capsys: pytest.CaptureFixture[str]):
    """The times that its default run shows are those that its introduction names."""
    load(NUMBERED[number]).main([], standalone_mode=False)
    shown = re.findall(r"^(\w+)\(.*\) takes (\S+) us, simulated without data$", capsys.readouterr().out, re.MULTILINE)
    said = FORMS[number].partition("When it wins:")[2].partition("\n\n")[0]
    assert len(shown) > 1 and [time for _, time in shown if not re.search(rf"(?<![\d.]){time}(?![\d.]\d)", said)] == []


def test_the_demo_draws_both_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "demo.svg"
    load(FOLDER.parent / "demo.py").main(["--devices=2", "--size=1024", f"--to={picture}"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "in order: right on 2 devices" in shown and "overlapped: right on 2 devices" in shown
    assert len(re.findall(r"^  (?:in order|overlapped) +[1-9]\d* us, at least", shown, re.MULTILINE)) == 2
    assert picture.read_text(encoding="utf-8").count('id="axes_') == 2


@pytest.mark.parametrize("wrong", [1.001, torch.nan])
def test_a_wrong_result_is_found(wrong: float):
    common = load(FOLDER / "common.py")
    right = torch.ones(4, 4, dtype=torch.float64)
    got = [torch.ones(4, 4), torch.ones(4, 4)]
    bound = [common.rounding(100, right)] * 2
    common.compare("right", got, [right, right], bound)
    got[1][2, 3] = wrong
    with pytest.raises(ValueError, match=r"wrong elements on each device: \[0, 1\]"):
        common.compare("wrong", got, [right, right], bound)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--machine=h200-sxm8", "did you mean 'h200-sxm-8'?"),
        ("--devices=16", "launch at most 8"),
        ("--size=0", "0 is not in the range x>=1"),
        ("--size=2", "2 elements do not make 4 shares: give --size 4 or more"),
        ("--timeline=nowhere/run.svg", "'nowhere/run.svg' cannot be written: No such file or directory"),
        ("--timeline=nowhere/run.json", "'nowhere/run.json' cannot be written: No such file or directory"),
        ("--timeline=run.txt", "end it in .html, .png, .svg, .pdf"),
    ],
)
def test_odd_options_get_an_answer(words: str, says: str, capsys: pytest.CaptureFixture[str]):
    """An error with a remedy, without a traceback."""
    with pytest.raises(SystemExit) as end:
        load(NUMBERED[3]).main([words])
    text = f"{end.value.code} {capsys.readouterr().err}"
    assert end.value.code != 0 and says in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (1, "T.copy(tile, B[by * TILE, bx * TILE], dst=(rank + 1) % size)"),
        (2, "T.copy(inbox[b * TILE, 0], tile)"),
        (4, 'T.wait(arrived[b], ">=", devices)'),
        (5, "source = (rank + size - step) % size"),
        (6, 'T.wait(arrived[shard], ">=", tiles_m * tiles_k)'),
        (7, "owner = (rank + bz + 1) % size"),
        (8, "T.allreduce(C_dev)"),
        (9, "T.all_gather(half)"),
        (9, "T.copy(half, other, dst=peer)"),
        (9, "T.barrier()  # the peer's half has arrived"),
        (9, "T.copy(total, logsum[bx, by * tile_h])"),
        (10, "T.copy(B[k * TILE_K + rank * share, by * TILE_N], T.view(b, layout=T.FullRow))"),
        (11, "T.barrier_arrive(full[stage])"),
        (12, "T.barrier_wait(full[stage], used % 2)"),
        (13, 'T.wait(arrived[h, t], ">=", step)'),
        (13, 'T.wait(free[there, h, i], ">=", (step + 1) // 2 * readers)'),
        (13, "T.signal(free[step % 2, h, t], dst=(rank + size - 1) % size)"),
        (14, "T.all_to_all(result, Out_dev, dim=0)"),
        (15, 'T.wait(arrived[t], ">=", size)'),
        (16, "T.copy(A, a_blocks[0, 0:rows, 0:inner], dst=row * side + (col + side - row) % side)"),
        (16, 'T.wait(arrived[0], ">=", (step + 1) * tiles_m * tiles_k)'),
        (16, 'T.wait(free[1], ">=", step + 1)'),
        (17, "T.barrier()  # panel `step` is everywhere; no device reads the previous one, nor in the next launch"),
        (17, "top = step % (panels // P) * width"),
        (18, "count = count + 1"),
        (18, 'T.wait(arrived[expert, source], ">=", 1)'),
        (19, 'T.wait(crossed[b], ">=", nodes)'),
        (20, 'T.wait(free[0], ">=", step)'),
        (20, "a_to = y * side + stepped(x, -2, side)"),
        (21, 'T.wait(sums_here[m, n], ">=", 1)'),
        (21, "T.copy(a, A[m * TILE, 0], dst=rank + 1, signal=rows_here[m])"),
        (22, 'T.wait(arrived[shard, part], ">=", 1)'),
        (22, "T.all_gather(A[rank, 0:rows, :], A, signal=arrived, chunk=chunk)"),
        (23, "T.signal(done[owner, part])"),
        (23, 'T.wait(arrived[source, part], ">=", 1)'),
        (23, "tiles = T.ceildiv(last - first, TILE_M) * tiles_n"),
    ],
)
def test_every_line_counts(number: int, line: str, tmp_path: Path):
    """Without one of its lines an example fails: its check would see a mistake there."""
    text = NUMBERED[number].read_text(encoding="utf-8")
    assert text.count(line) == 1
    name, _, value = line.partition(" = ")
    broken = tmp_path / NUMBERED[number].name
    broken.write_text(text.replace(line, f"{name} = 0 * {value}" if value else "pass"), encoding="utf-8")
    with pytest.raises((ValueError, tilescale.errors.TileScaleError)):
        load(broken).main(RUNS.get(number, USUAL)[2].split(), standalone_mode=False)


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("tilescale run", 13), pytest.param("mpirun", 8, marks=pytest.mark.nightly)],
    ids=lambda v: str(v),
)
def test_as_a_job(launcher: str, number: int):
    path = NUMBERED[number]
    words = [*command(launcher, 2), str(path), "--size=96"]
    done = run_words(words, TILESCALE_TIMEOUT_S="60", TILESCALE_EMULATE="1")
    assert done.code == 0, done.output
    for rank in range(2):
        assert len(re.findall(rf"device {rank}: largest error", done.output)) == programs(path), done.output
    assert len(re.findall("emulated h200-sxm-8 in", done.output)) == programs(path)


MODELS = sorted((FOLDER.parent / "models").glob("*.py"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_as_jobs(path: Path):
    if path.stem == "train_llama":
        pytest.importorskip("transformers")
    done = run_words([*command("tilescale run", 2), str(path)], TILESCALE_EMULATE="1")
    assert done.code == 0 and done.output.count(": right") == 2, done.output


def test_models_are_short_explained_and_in_their_table():
    table = (MODELS[0].parent / "README.md").read_text(encoding="utf-8")
    for path in MODELS:
        text = path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text))
        assert len(text.splitlines()) < 150 and f"({path.name})" in table
        assert docstring is not None and "The idea:" in docstring and "Things to try:" in docstring
