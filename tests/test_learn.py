# SPDX-License-Identifier: MIT
"""The exercises of examples/learn: solutions pass, blanks are reported, and plausible wrong answers get the right
advice.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.test_docs import write_or_compare

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "learn"
EXERCISES = sorted(FOLDER.glob("[0-9]*.py"))
every_exercise = pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def beside_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def exercise(path: Path):
    import learn

    return learn.load(path).exercise


def run(capsys: pytest.CaptureFixture[str], main, words: list[str]) -> tuple[int, str]:
    """Exit status and output of a command."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code), capsys.readouterr().out


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_the_ladder_has_no_gap():
    assert [int(path.name[:2]) for path in EXERCISES] == list(range(1, 11))
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in table for path in EXERCISES)
    assert [path.name for path in sorted((FOLDER / "solutions").iterdir()) if path.suffix] == [
        p.name for p in EXERCISES
    ]


@every_exercise
def test_a_statement_teaches(path: Path, capsys: pytest.CaptureFixture[str]):
    text = exercise(path).statement
    title, _, body = text.partition("\n\n")
    assert title.endswith(".") and "\n\nUse:\n" in body and "\n\nHints:\n" in body
    assert re.search(r"^    .*(-->|\||<-)", body, re.MULTILINE), "a drawing"
    status, shown = run(capsys, exercise(path).main, ["--help"])
    assert status == 0
    assert all(line in shown for line in text.splitlines()), "as it stands in the file, not wrapped"


@every_exercise
def test_advice_is_about_errors_that_exist(path: Path):
    about = {key.partition(" of ")[0] for key in exercise(path).advice}
    assert about <= {*tilescale.errors.__all__, "ValueError", "TypeError", "wrong values", "too slow"}


def outline(path: Path) -> list[str]:
    """Constants, and the signatures of tile programs."""
    body = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        ast.unparse(node) for node in body.body if isinstance(node, ast.Assign) and "exercise" not in ast.unparse(node)
    ]
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "T.prim_func" for d in node.decorator_list):
            found.append(f"{node.name}({ast.unparse(node.args)})")
    return found


@every_exercise
def test_a_solution_has_the_outline_of_its_exercise(path: Path):
    mine = outline(path)
    assert [line for line in outline(path.parent / "solutions" / path.name) if line not in mine] == []


# -- blanks and solutions ----------------------------------------------------------------------------------------------


@every_exercise
def test_a_blank_says_what_is_to_be_written(path: Path, capsys: pytest.CaptureFixture[str]):
    status, shown = run(capsys, exercise(path).main, [])
    assert status == 1
    assert f"{path.stem.replace('_', ' ')}: not written yet" in shown
    (line,) = map(int, re.findall(rf"{re.escape(str(path))}:(\d+)", shown))
    assert "learn.todo(" in path.read_text(encoding="utf-8").splitlines()[line - 1]
    assert "--help" in shown


@every_exercise
def test_a_solution_is_right(path: Path, capsys: pytest.CaptureFixture[str]):
    status, shown = run(capsys, exercise(path).main, ["--solution"])
    assert status == 0, shown
    assert "solved" in shown and "in several orders" in shown


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    import learn
    import progress

    monkeypatch.setattr(learn, "DEVICES", {"h200-sxm-8": [2]})
    status, shown = run(capsys, progress.main, [])
    assert status == 1 and shown.count("not written yet") == 10 and "0 of 10 solved" in shown
    status, shown = run(capsys, progress.main, ["--solutions"])
    assert status == 0, shown
    assert "10 of 10 solved" in shown


def test_a_solved_exercise_names_the_next(capsys: pytest.CaptureFixture[str]):
    import learn

    blank = exercise(EXERCISES[0])
    solved = dataclasses.replace(blank, program=learn.load(blank.solution).program)
    status, shown = run(capsys, solved.main, [])
    assert status == 0 and "solutions/01_neighbour_shift.py" in shown and "02_tell_that_it_arrived.py" in shown


def test_a_right_answer_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    status, _ = run(capsys, exercise(EXERCISES[0]).main, ["--solution", f"--timeline={tmp_path / 'launch.svg'}"])
    assert status == 0 and "<svg" in (tmp_path / "launch.svg").read_text(encoding="utf-8")
    status, _ = run(capsys, exercise(EXERCISES[0]).main, [f"--timeline={tmp_path / 'blank.svg'}"])
    assert status == 1 and not (tmp_path / "blank.svg").exists()


# -- wrong answers -----------------------------------------------------------------------------------------------------

FIRST = "                    for step in T.serial(size):\n                        shard"
ALL_FIRST = {FIRST: f'                    for s in T.serial(size):\n{" " * 24}T.wait(arrived[s], ">=", 4)\n{FIRST}'}
SEND = """                        T.copy(part, inbox[rank, 0, b * TILE], dst=owner, signal=arrived[b])
"""
SEND_LATER = {
    SEND: f"""                        T.copy(part, kept[owner, 0, b * TILE])
                    for step in T.serial(size):
                        owner = (rank + step + 1) % size
                        T.copy(kept[owner, 0, b * TILE], part)
{SEND}""",
    "            arrived =": """            kept = T.alloc((devices, ROWS, COLUMNS), "float32", level="l2")
            arrived =""",
}
TO_ALL = {
    'T.wait(free[b], ">=", step - 1)': "T.copy(tile, Y[rank, b, 0, 0], dst=(rank + step + 1) % size)",
    "T.copy(tile, inbox[step % 2, b, 0, 0], dst=right, signal=arrived[b])": "pass",
    'T.wait(arrived[b], ">=", step + 1)': "pass",
    "T.copy(inbox[step % 2, b, 0, 0], tile)": "pass",
    "T.signal(free[b], dst=left)": "pass",
    "T.copy(tile, Y[(rank + size - step - 1) % size, b, 0, 0])": "pass",
}
EARLY = {
    "T.copy(tile, inbox": "T.signal(arrived[b], dst=(rank + 1) % size)\n                    T.copy(tile, inbox",
    ", signal=arrived[b])": ")",
}
AGAIN = {
    "T.copy(mine, box[wg, 0, 0])": "for i, j in T.Parallel(ROWS, HALF):",
    f"{' ' * 20}T.barrier()\n{' ' * 20}T.copy(box[1 - wg, 0, 0], theirs)\n{' ' * 20}T.barrier()\n": (
        f"{' ' * 24}theirs[i, j] = X[r, i, (1 - wg) * HALF + j] * X[r, i, (1 - wg) * HALF + j]\n"
    ),
}
WRONG = [
    (1, {", dst=(rank + 1) % size": ""}, ["B of device 0 is wrong", "on all 2 devices", "the copy stayed at home"]),
    (1, {"T.copy(tile, B, dst=(rank + 1) % size)": "pass"}, ["it is nan, and should be -2", "it was not written"]),
    (1, {"(rank + 1) % size": "rank + 1"}, ["device 1, block 0 names peer 2", "the ring is open"]),
    (1, {"(rank + 1) % size": "(rank + size - 1) % size"}, ["With 3 devices", "went the other way round"]),
    (1, {"T.copy(tile, B, dst": "T.copy(A, tile, dst"}, ["'tile' lies in layer 'l1'", "The tile is the near side"]),
    (1, {"T.copy(tile, B": "T.copy(tilly, B"}, ["NameError: name 'tilly' is not defined", "T.copy(tilly, B, dst"]),
    (1, {"dst=(rank + 1) % size": 'dst="device 1"'}, ["a peer is named by its rank"]),
    (1, {"T.copy(tile, B, dst=(rank + 1)": "for r in range(2): T.copy(tile, B, dst=(r + 1)"}, ["to the same B"]),
    (1, {"T.copy(tile, B, dst=(rank + 1) % size)": "raise SystemExit(0)"}, ["SystemExit: 0 at", "raise SystemExit(0)"]),
    (2, {", signal=arrived[b])": ")", 'T.wait(arrived[b], ">=", 1)': "T.barrier()"}, ["its own tile alone"]),
    (2, {'T.wait(arrived[b], ">=", 1)': "while arrived[b] < 1: T.evaluate(0)"}, ["flags are looked at by T.wait"]),
    (2, {", signal=arrived[b])": ")"}, ["no statement of the program signals it", "whose is it, which block's"]),
    (2, {"signal=arrived[b]": "signal=arrived[0]"}, ["inbox[0, 0:16, 0:16]", "or of another block's?"]),
    (
        2,
        {"signal=arrived[b])": "signal=None); T.signal(arrived[b])"},
        ["reads inbox[0, 0:16, 0:16]", "read before the tile was in it"],
    ),
    (
        2,
        {'T.wait(arrived[b], ">=", 1)': "pass"},
        ["which is uninitialized", "The order is: data, signal; wait, data"],
    ),
    (2, EARLY, ["signals arrived[0] before that", "data, signal; wait, data"]),
    (2, {'">=", 1': '">=", 2'}, ["arrived[0] = 1", "It is raised once"]),
    (2, {"dst=(rank + 1) % size": "dst=rank"}, ["is twice the device's own X", "Name the peer with dst="]),
    (3, {"box[1 - wg, ": "box[wg, "}, ["Y is wrong in", "Y is zero: `theirs` is `mine`"]),
    (3, {"box[1 - wg, ": "box[wg + 1, "}, ["box[2:3, 0:16, 0:32] is outside the buffer"]),
    (
        3,
        {"T.barrier()\n                    T.copy(box": "T.copy(box"},
        ["warpgroup 0 reads box[1, 0:16, 0:32]", "Between a write of a box and a read"],
    ),
    (
        3,
        {"theirs)\n                    T.barrier()": "theirs)"},
        ["(reads here)", "between that read and the write of the next round"],
    ),
    (
        4,
        {'T.wait(free[b], ">=", step - 1)': "pass"},
        ["With 4 devices", "before you send into a slot for the second time"],
    ),
    (3, AGAIN, ["us are enough", "Does `theirs` come through the box?"]),
    (4, {"step % 2": "0"}, ["With 3 devices", "use the slots in turns"]),
    (
        4,
        {"T.signal(free[b], dst=left)": "pass", "T.copy(inbox": "T.signal(free[b], dst=left); T.copy(inbox"},
        ["signals free[0] before that", "when you have taken the tile out, not before"],
    ),
    (4, {'free[b], ">=", step - 1': 'free[b], ">=", step + 1'}, ["wait for free[0] >= 1", "walk through the steps"]),
    (4, {'">=", step + 1': '"==", step + 1'}, ["arrived[0] = 2", "not for that very number"]),
    (4, {"rank + size - step - 1": "rank + step + 1"}, ["With 3 devices", "in the wrong places of Y"]),
    (4, {"step % 2": "step"}, ["With 4 devices", "inbox[2, 0, 0, 0] is outside", "used in turns: step % 2"]),
    (4, TO_ALL, ["has 2 tiles to pass on", "Only neighbours talk on a ring"]),
    (5, {"inbox[r, b": "inbox[(rank + r) % size, b"}, ["With 3 devices", "right but for their rounding"]),
    (5, {"dst=(rank + step) % size": "dst=rank + step"}, ["names peer 2", "count modulo size"]),
    (5, {"T.clear(total)": "pass"}, ["reads total[0:16, 0:16]", "adds to what is there: clear it first"]),
    (5, {"for step in T.serial(size)": "for step in T.serial(1, size)"}, ["arrived[0] = 1", "else size - 1"]),
    (5, {'>=", size': '>=", size - 1'}, ["(reads here)", "wait until the flag has counted every sender"]),
    (5, {"inbox[rank, b": "inbox[0, b"}, ["device 1, block 0 writes it and device 0, block 0 writes it", "own rank"]),
    (6, {"layout=T.FullCol": "layout=T.FullRow"}, ["'A' has shape (64, 96)", "columns of A that are its share"]),
    (6, {"k * STEP], a": 'T.rank("device") * share + k * STEP], a'}, ["Only the share of device 0"]),
    (6, {"A_dev[b * ROWS, k * STEP]": "A_dev[k * STEP, b * ROWS]"}, ["Block b multiplies rows b * ROWS"]),
    (6, {"T.allreduce(y)": "pass"}, ["what is missing is the sum over the devices"]),
    (7, {"T.barrier()  #": "pass  #"}, ["inbox[0, 0:16, 0:16] of device 1", "put a handshake at the entry"]),
    (7, {"(launch + 1) * size": "size"}, ["(reads here)", "a flag that is never cleared counts on"]),
    (
        7,
        {"T.barrier()  #": "T.barrier(); T.clear(arrived)  #"},
        ["arrived[0] of device 0", "First clear, then a barrier"],
    ),
    (7, {"T.barrier()  #": "T.clear(arrived); T.barrier()  #"}, ["arrived[0] >= 4", "you clear it and yet"]),
    (7, {'with T.Scale("block"):': "if True:"}, ["tile 'tile' is one of a block", "without tiles on chip"]),
    (8, {"BLOCKS * (K // STEP)": "BLOCKS * (K // STEP) + 1"}, ["arrived[1] = 4", "2 blocks send 2 pieces each"]),
    (8, {"BLOCKS * (K // STEP)": "K // STEP"}, ["gathered[1, 32:64, 0:32] of device 1", "for all of its pieces"]),
    (8, ALL_FIRST, ["On 2 devices of h200-sxm-8 a launch takes", "us are enough", "or for all before it begins?"]),
    (8, {"shard = (rank + step) % size": "shard = step"}, ["--timeline FILE", "its own, which is here"]),
    (8, {"gathered[shard, m": "gathered[rank, m"}, ["the product of the device's own shard"]),
    (8, {"C_dev[shard, m": "C_dev[step, m"}, ["wrong on device 1 and right on device 0", "Compare three places"]),
    (9, {"top = T.max(lse_a, lse_b)": "top = 0"}, ["it is nan", "an exponential was too large"]),
    (9, {", top + T.log(total)": ""}, ["returned 1 values for 2 tiles", "as many values as it combines"]),
    (9, {"(Out, Lse, fn=merge)": "(Out)"}, ["did you pass fn=merge?"]),
    (9, {"(Out, Lse, fn=merge)": "(Lse, Out, fn=merge)"}, ["do not belong together", "more dimensions comes first"]),
    (9, {"top + T.log(total)": "top"}, ["Lse is the largest of the parts"]),
    (
        10,
        {"T.clear(c)\n                        T.gemm": "T.gemm"},
        ["reads c[0:32, 0:32]", "what T.gemm or += adds to"],
    ),
    (10, {"A_dev[owner": "A_dev[rank"}, ["All C are alike", "not A_dev[owner]"]),
    (10, {'">=", size': '">=", 1'}, ["reads inbox[0, 0:32, 0:32]", "wait for all parts of this tile"]),
    (
        10,
        {"T.clear(arrived)\n                T.barrier()": "T.barrier(); T.clear(arrived)"},
        ["reads arrived[0] of device 0", "If it is a flag: clear it"],
    ),
    (10, {"(rank + step + 1) % size": "(rank + step) % size"}, ["us are enough", "which owner comes last"]),
    (10, SEND_LATER, ["On 8 devices", "leave for its owner as soon as it is computed"]),
    (10, {'"int32", level="l2"': '"int32", level="l1"'}, ["'arrived' is a tile on chip"]),
    (10, {"T.clear(arrived)": "pass"}, ["which is uninitialized", "If it is a flag: clear it, then a barrier"]),
]


def answer(number: int, changes: dict[str, str], folder: Path, **asked_for):
    """The verdict on a solution with some of its text changed. `asked_for`: changes of the exercise."""
    import judge
    import learn

    asked = dataclasses.replace(exercise(EXERCISES[number - 1]), **asked_for)
    text = asked.solution.read_text(encoding="utf-8")
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong)
    path = folder / asked.solution.name
    path.write_text(text, encoding="utf-8")
    return judge.judge(asked, learn.load(path).program)


@pytest.mark.parametrize(("number", "changes", "says"), WRONG, ids=[f"{n}: {says[-1]}" for n, _, says in WRONG])
def test_a_wrong_answer_gets_advice(number: int, changes: dict[str, str], says: list[str], tmp_path: Path):
    verdict = answer(number, changes, tmp_path)
    assert verdict.state == ("right, but late" if "us are enough" in verdict.text else "not right yet")
    plain = " ".join(verdict.text.split())
    assert [part for part in says if part not in plain] == [], verdict.text


TAKE = "                    T.copy(box[1 - wg, 0, 0], theirs)\n"
RIGHT = [
    (1, {"T.copy(tile, B, dst=(rank + 1) % size)": "T.copy(A, tile, src=(rank - 1) % size); T.copy(tile, B)"}),
    (2, {", signal=arrived[b])": "); T.signal(arrived[b], dst=(rank + 1) % size)"}),
    (3, {"T.copy(mine, box[wg, 0, 0])": "T.barrier(); T.copy(mine, theirs, dst=1 - wg)", TAKE: ""}),
    (4, {'free[b], ">=", step - 1': 'free[b], ">=", step'}),
    (5, {"dst=(rank + step) % size": "dst=step"}),
    (6, {"A, layout=T.FullCol": "A, layout=T.Shard(1)", "x, layout=T.FullRow": "x, layout=T.FullCol"}),
    (7, {"T.barrier()  # every": "T.clear(arrived); T.barrier()  # every", "(launch + 1) * size": "size"}),
    (8, {"BLOCKS * (K // STEP)": "BLOCKS * K // STEP", "peer = (rank + step) % size": "peer = step"}),
    (9, {"T.allreduce(Out, Lse, fn=merge)": 'T.allreduce(Out, Lse, fn=merge, impl="ring")'}),
    (10, {"owner = (rank + step + 1) % size": "owner = (rank + size - step - 1) % size"}),
]
"""Other right answers: (exercise, what they have in place of parts of the solution)."""


@pytest.mark.parametrize(("number", "changes"), RIGHT, ids=lambda value: value if isinstance(value, int) else "")
def test_other_right_answers_are_accepted(number: int, changes: dict[str, str], tmp_path: Path):
    verdict = answer(number, changes, tmp_path, sizes={"h200-sxm-8": [3]})
    assert verdict.state == "solved", verdict.text


SHOWN = [(2, EARLY), (1, {", dst=(rank + 1) % size": ""})]
"""The wrong answers that docs/learning.md shows, in its order."""


def test_the_page_shows_what_is_said(tmp_path: Path):
    page = ROOT / "docs" / "learning.md"
    texts = iter([answer(*shown, tmp_path).text.replace(f"{tmp_path}/", "") for shown in SHOWN])
    block = re.compile(r"^```text\n.*?^```", re.DOTALL | re.MULTILINE)
    write_or_compare(page, block.sub(lambda _: f"```text\n{next(texts)}\n```", page.read_text(encoding="utf-8")))
    assert next(texts, None) is None


def test_a_loop_without_an_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import judge

    launch = judge._Trial._launch

    def short(*given):  # tracing, which has an end, takes longer on a busy machine
        monkeypatch.setattr(judge, "LIMIT_S", 3.0)
        return launch(*given)

    monkeypatch.setattr(judge._Trial, "_launch", short)
    turns = "while A[0, 0] != 99: A[0, 0] = 1 - A[0, 0]"  # the value that it waits for changes: no deadlock
    verdict = answer(1, {"T.copy(tile, B, dst=(rank + 1) % size)": turns}, tmp_path)
    assert verdict.state == "not right yet"
    assert "still running after 3 s" in verdict.text and turns in verdict.text


def test_every_exercise_has_wrong_answers():
    assert all([number for number, _, _ in WRONG].count(n) >= 2 for n in range(1, 11))


def test_a_collective_is_not_what_is_asked_for():
    """Right results that a collective made, where the exercise is to make one."""
    import judge

    @T.prim_func
    def one_line(X: T.Tensor((2, 16, 16), "float32"), Y: T.Tensor((2, 16, 16), "float32")):
        with T.Kernel(device=2, block=2, threads=128) as b:
            with T.Scale("block"):
                tile = T.alloc((16, 16), "float32", level="l1")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device"):
                    T.allreduce(tile)
                T.copy(tile, Y[b, 0, 0])

    asked = dataclasses.replace(exercise(EXERCISES[4]), sizes={"h200-sxm-8": [2]})
    verdict = judge.judge(asked, lambda devices: one_line)
    assert verdict.state == "not right yet"
    assert "The results are right, and device allreduce (" in verdict.text


def test_whole_phases_are_not_what_is_asked_for():
    """GEMM, then reduce-scatter: right, but not overlapped."""
    import judge

    @T.prim_func
    def phases(
        A: T.Tensor((2, 32, 64), "bfloat16"), B: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((32, 64), "float32")
    ):
        with T.Kernel(device=2, block=(2, 2), threads=128) as (n, m):
            partial = T.alloc((64, 64), "float32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((32, 32), "bfloat16", level="l1")
                b = T.alloc((32, 32), "bfloat16", level="l1")
                c = T.alloc((32, 32), "float32", level="l0")
                T.copy(A_dev[m, 0, 0], a)
                T.copy(B_dev[0, n * 32], b)
                T.clear(c)
                T.gemm(a, b, c)
                T.copy(c, partial[m * 32, n * 32])
            with T.Scale("device"):
                T.reduce_scatter(partial, C)

    asked = dataclasses.replace(exercise(EXERCISES[9]), sizes={"h200-sxm-8": [2]})
    verdict = judge.judge(asked, lambda devices: phases)
    assert verdict.state == "not right yet"
    assert "a device has signalled 0 times and sends 4 tiles" in verdict.text


def test_a_program_that_is_right_in_one_order_only():
    """Blocks take tickets: no race, and right if they start in the order of their numbers."""
    import judge
    import learn

    @T.prim_func
    def tickets(next_one: T.Tensor((1,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(device=1, block=8, threads=1) as b:
            ticket = T.alloc_var("int32")
            ticket = T.atomic_add(next_one[0], 1, return_prev=True)
            Y[ticket] = b

    def case(devices, rng):
        args = {"next_one": [torch.zeros(1, dtype=torch.int32)], "Y": [torch.full((8,), -1, dtype=torch.int32)]}
        return learn.Case(args=args, want={"Y": [torch.arange(8)]})

    toy = learn.Exercise(__file__, lambda size: tickets, case, sizes={"h200-sxm-8": [1]})
    verdict = toy.check()
    assert verdict.state == judge.WRONG
    assert "It was right when the units took turns, and is wrong when they run in another order:" in verdict.text
    assert "Y is wrong in" in verdict.text
