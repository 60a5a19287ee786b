# SPDX-License-Identifier: MIT
"""Jobs in forked processes: all are done once, a failing or dying one does not stop the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilescale.backends import processes, progress
from tilescale.comm import Team
from tilescale.ops import whole_tensors
from tilescale.ops.kernels import kernels
from tilescale.runtime import ahead, early


def touch(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_job_is_done_once(most: int, tmp_path: Path):
    processes.run_in_processes([partial(touch, tmp_path / str(n)) for n in range(7)], most)
    done = [(tmp_path / str(n)).read_text().split() for n in range(7)]
    assert all(len(pids) == 1 for pids in done)
    forked = {pid for pids in done for pid in pids} - {str(os.getpid())}
    assert bool(forked) == (most > 1)


def test_processes_of_an_earlier_call_take_no_jobs_of_the_next_one(tmp_path: Path):
    for call in range(40):
        (tmp_path / str(call)).mkdir()
        processes.run_in_processes([partial(touch, tmp_path / str(call) / str(n)) for n in range(3)], 2)
    counts = [len((path / str(n)).read_text().split()) for path in tmp_path.iterdir() for n in range(3)]
    assert counts == [1] * 120


@pytest.mark.parametrize("end", [lambda: 1 / 0, lambda: os._exit(3)], ids=["raises", "dies"])
def test_a_job_that_fails_leaves_the_others(end, tmp_path: Path):
    jobs = [end, *(partial(touch, tmp_path / str(n)) for n in range(4))]
    processes.run_in_processes(jobs, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_processes_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "STALL_S", 0.5)
    begin = time.monotonic()
    processes.run_in_processes([partial(time.sleep, 300), partial(time.sleep, 300)], 2)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("count", [1, 2])
def test_what_takes_long_shows_a_bar(count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Also where the first job to end is the last one."""
    monkeypatch.setenv("TILESCALE_PROGRESS", "on")
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich a terminal
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    progress.settings.cache_clear()
    processes.run_in_processes([partial(time.sleep, 0.3)] * count, 2, "compiling kernels")
    progress.settings.cache_clear()
    assert "compiling kernels" in capsys.readouterr().err


class Compilation(SimpleNamespace):
    """A kernel of one grid, which leaves a file when it is lowered, and one when it is compiled."""

    options: dict[str, object] = {}
    program = SimpleNamespace(launches=(None,))
    declaration = None
    is_compiled = False
    __hash__ = object.__hash__

    def lower(self) -> Compilation:
        (self.folder / f"lowered {self.number}").touch()
        return self

    def ahead(self, options: object) -> list[Compilation]:
        return [self]

    def pinned(self) -> Compilation:
        return self

    def run(self) -> None:
        touch(self.folder / f"compiled {self.number}")

    def compilations(self) -> list[Compilation]:
        self.log.append(f"bind {self.number}")
        return [self]

    def prepare(self) -> None:
        self.log.append(f"prepare {self.number}")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rank 1 of two on a node that compiles, and the order of its steps."""
    log: list[str] = []
    world = SimpleNamespace(local_rank=1, local_size=2, barrier=lambda: log.append("barrier"), log=log)
    world.all_gather = lambda begun: log.append("agree") or [False, begun]
    monkeypatch.setattr(ahead, "init", lambda: world)
    monkeypatch.setattr(ahead, "cores", lambda: 4)
    monkeypatch.setattr(ahead.backends, "compiles", lambda: True)
    return world


def compiled(folder: Path, count: int) -> dict[str, set[str]]:
    """The processes that compiled a kernel, once there are `count`."""
    end = time.monotonic() + 60
    while len(found := sorted(folder.glob("compiled *"))) < count and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)  # a process that has made a file may not have written to it
    return {path.name: set(path.read_text().split()) for path in found}


def test_a_kernel_that_a_dry_run_calls_is_compiled_meanwhile(job: SimpleNamespace, tmp_path: Path):
    """By the rank whose share it is, in a process of its own."""
    needed = ahead.NeededKernels()
    for number in range(4):
        needed.add(Compilation(number=number, folder=tmp_path, log=job.log))
    found = compiled(tmp_path, 2)
    assert set(found) == {"compiled 0", "compiled 2"} and job.log == []
    assert len(set.union(*found.values()) | {str(os.getpid())}) == 3


class Grid(Compilation):
    """A grid whose compilation ends with that of another one."""

    def run(self) -> None:
        super().run()
        while len(list(self.folder.glob("compiled *"))) < 2:
            time.sleep(0.01)


@pytest.mark.parametrize(("cores", "launches", "grids"), [(4, 2, 3), (16, 1, 2)], ids=["launches", "many cores"])
def test_grids_of_a_kernel_are_compiled_together(
    cores: int, launches: int, grids: int, job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of device phases, too, for which the program has no launch; and both of a launch on many cores."""

    class Several(Compilation):
        program = SimpleNamespace(launches=(None,) * launches)

        def ahead(self, options: object) -> list[Grid]:
            return [Grid(number=number, folder=self.folder) for number in range(grids)]

        def compilations(self) -> list[Compilation]:
            return []

    monkeypatch.setattr(ahead, "cores", lambda: cores)
    needed = ahead.NeededKernels()
    needed.add(Several(number=0, folder=tmp_path, log=job.log))
    ahead.compile_all(needed)
    found = compiled(tmp_path, grids)
    assert all(len(made) == 1 for made in found.values()) and found["compiled 0"] != found["compiled 1"]


def test_programs_are_bound_while_their_kernels_are_compiled(job: SimpleNamespace, tmp_path: Path):
    """Errors of lowering are raised where all ranks ask for the program."""

    class Slow(Compilation):
        def run(self) -> None:
            while not (self.folder / "bound").exists():
                time.sleep(0.01)
            super().run()

        def compilations(self) -> list[Compilation]:
            (self.folder / "bound").touch()
            return super().compilations()

    needed = ahead.NeededKernels()
    for number in range(2):
        needed.add(Slow(number=number, folder=tmp_path, log=job.log))
    ahead.compile_all(needed)
    assert job.log == ["agree", "bind 0", "bind 1", "barrier", "prepare 0", "barrier", "prepare 1"]
    assert set(compiled(tmp_path, 1)) == {"compiled 0"}


def test_more_kernels_than_cores_are_compiled_after_the_dry_run(job: SimpleNamespace, tmp_path: Path):
    class Waiting(Compilation):
        def run(self) -> None:
            while not (self.folder / "ended").exists():
                time.sleep(0.01)
            super().run()

    needed = ahead.NeededKernels()
    for number in range(10):
        needed.add(Waiting(number=number, folder=tmp_path, log=job.log))
    assert len(set(needed.runs.values())) == 2
    (tmp_path / "ended").touch()
    ahead.compile_all(needed)
    assert set(compiled(tmp_path, 5)) == {f"compiled {number}" for number in range(0, 10, 2)}


def test_nothing_waits_for_kernels_of_other_row_counts(job: SimpleNamespace, tmp_path: Path):
    class Endless(Compilation):
        def run(self) -> None:
            super().run()
            time.sleep(300)

    needed, made = ahead.NeededKernels(), Compilation(number=0, folder=tmp_path, log=job.log)
    needed.add(made)
    for number in (1, 2):
        later = Endless(number=number, folder=tmp_path, log=job.log)
        needed.later[lambda *given: given, (made, later)] = None
    begin = time.monotonic()
    ahead.compile_all(needed)
    found = compiled(tmp_path, 2)
    assert set(found) == {"compiled 0", "compiled 2"} and time.monotonic() - begin < 100
    assert len(found["compiled 0"]) == 1  # not again for other rows


def test_nothing_is_forked_for_what_the_caches_have(
    job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One process looks whether they have the kernels of other row counts, too."""
    forked: list[tuple[int, int]] = []
    monkeypatch.setattr(ahead, "Running", lambda jobs, most, *niceness: forked.append((len(jobs), most)))
    needed = ahead.NeededKernels()
    for number in range(4):
        needed.add(Compilation(number=number, folder=tmp_path, log=job.log, is_compiled=True))
        needed.later[lambda *given: given, (number,)] = None
    needed.begin(4)
    assert forked == []
    needed.begin_later()
    assert forked == [(2, 1)]


def kernels_of(*made: Compilation) -> tuple[Compilation, ...]:
    return made


def test_what_the_caches_are_known_to_have_forks_nothing(
    job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As long as a forked process lives, pages that this one writes are copied, in the first step of a training."""
    monkeypatch.setattr(ahead.backends, "done_file", lambda work, machine: tmp_path / "done" if work else None)
    monkeypatch.setattr(ahead, "call_name", lambda find, given: find.__name__)

    def begun(*numbers: int) -> ahead.NeededKernels:
        needed = ahead.NeededKernels()
        needed.later[lambda: (), ()] = None
        needed.later[kernels_of, tuple(Compilation(number=n, folder=tmp_path, log=job.log) for n in numbers)] = None
        needed.begin_later()
        return needed

    begun(1, 2)
    assert len(compiled(tmp_path, 2)) == 2
    end = time.monotonic() + 60
    while not (tmp_path / "done").exists() and time.monotonic() < end:
        time.sleep(0.01)
    monkeypatch.setattr(ahead, "Running", lambda *given: pytest.fail("forked"))
    begun(1, 2)
    (tmp_path / "done").unlink()
    with pytest.raises(pytest.fail.Exception, match="forked"):
        begun(1, 2)


def test_all_ranks_ask_for_the_same_file(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """By the ranks of a team; what an operator needs later has a name."""
    asked: list[str] = []
    monkeypatch.setattr(ahead.backends, "done_file", lambda work, machine: asked.append(work))
    monkeypatch.setattr(ahead, "Running", lambda *given: None)
    for ranks, rank in (((0, 1), 0), ((0, 1), 1), ((0, 2), 0)):
        job.local_size, job.local_rank = 1, 0
        with ahead.dry_run() as needed:
            team = Team(ranks=ranks, rank=rank)
            ahead.also_needed(kernels, (whole_tensors.sum_program, team, "bfloat16", "sum", None))
        needed.begin_later()
    first, second, third = asked
    assert first == second != third and "" not in asked


def test_work_that_fails_is_not_done(job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Broken(Compilation):
        def run(self) -> None:
            super().run()
            raise ValueError("no compiler")

    monkeypatch.setattr(ahead.backends, "done_file", lambda work, machine: tmp_path / "done")
    needed = ahead.NeededKernels()
    with pytest.raises(ValueError, match="no compiler"):
        needed._compile_found(kernels_of, (Broken(number=0, folder=tmp_path, log=job.log),), tmp_path / "done")
    assert not (tmp_path / "done").exists()


class MemberTeam(SimpleNamespace):
    """A team that notes where its ranks meet."""

    rank, size = 1, 2

    def barrier(self) -> None:
        self.log.append("barrier")


@pytest.fixture
def none_begun() -> Iterator[None]:
    early.taken()
    yield
    early.taken()


@pytest.mark.usefixtures("none_begun")
def test_the_first_call_waits_for_a_compilation_that_has_begun(job: SimpleNamespace, tmp_path: Path):
    """On each rank of its team: one of them compiles the kernel. Other row counts follow when all have ended."""

    class Slow(Compilation):
        def run(self) -> None:
            time.sleep(0.5)
            super().run()

    made = [Slow(number=number, folder=tmp_path, log=job.log) for number in range(2)]
    later = Compilation(number=7, folder=tmp_path, log=job.log)
    other, team = Compilation(number=8, folder=tmp_path, log=job.log), MemberTeam(log=job.log)
    early.begin(made, {(lambda: (), ()): None, (kernels_of, (later,)): None})
    early.finish(other, team)
    assert job.log == []
    early.finish(made[0], team)  # which this rank compiles
    assert (tmp_path / "compiled 0").exists() and job.log == ["bind 0", "barrier"]
    early.finish(made[0], team)
    assert job.log == ["bind 0", "barrier"], "not again"
    early.finish(made[1], team)
    assert job.log[2:] == ["bind 1", "barrier"] and not (tmp_path / "compiled 1").exists()
    while early._begun.busy:
        time.sleep(0.01)
    early.finish(other, team)
    assert set(compiled(tmp_path, 2)) == {"compiled 0", "compiled 7"}


@pytest.mark.usefixtures("none_begun")
def test_a_listing_names_what_the_caches_must_have(
    job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For later processes, which need not find the kernels again."""
    listing = tmp_path / "listing"
    monkeypatch.setattr(early, "done_file", lambda find, given: tmp_path / find.__name__ if given else None)
    assert not early.are_compiled(None) and not early.are_compiled(listing)
    early.begin([], {(kernels_of, (1,)): None, (compiled, (2,)): None}, listing)
    assert not early.are_compiled(listing)
    (tmp_path / "kernels_of").touch()
    assert not early.are_compiled(listing)
    (tmp_path / "compiled").touch()
    assert early.are_compiled(listing)
    early.begin([], {(kernels_of, ()): None}, tmp_path / "other")
    assert not (tmp_path / "other").exists(), "some kernels have no name"
    monkeypatch.setattr(early, "replacing", lambda path: (_ for _ in ()).throw(OSError("read-only")))
    early.begin([], {}, tmp_path / "third")
    assert not early.are_compiled(tmp_path / "third")


@pytest.mark.usefixtures("none_begun")
def test_a_warm_up_takes_over_what_has_begun(job: SimpleNamespace, tmp_path: Path):
    made = [Compilation(number=number, folder=tmp_path, log=job.log) for number in range(3)]
    early.begin(made[:2], {})
    with ahead.dry_run(early.taken()) as needed:
        for kernel in made:
            needed.add(kernel)
    ahead.compile_all(needed)
    found = compiled(tmp_path, 2)
    assert set(found) == {"compiled 0", "compiled 2"} and all(len(each) == 1 for each in found.values())
    log, team = list(job.log), MemberTeam(log=job.log)
    early.finish(made[0], team)
    assert job.log == log, "nothing is left to wait for"


def test_nothing_is_forked_where_nothing_is_compiled(
    job: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ahead.backends, "compiles", lambda: False)
    monkeypatch.setattr(ahead, "Running", lambda *given: pytest.fail("forked"))
    needed = ahead.NeededKernels()
    needed.add(Compilation(number=0, folder=tmp_path, log=job.log))
    ahead.compile_all(needed)
    assert job.log == ["agree", "bind 0", "prepare 0"], "no rank waits for another one's compilations"


def test_a_process_whose_parent_has_ended_takes_no_further_job(tmp_path: Path):
    script = (
        "import os, time; from pathlib import Path; from tilescale.backends.processes import Running\n"
        "folder = Path(os.environ['FOLDER'])\n"
        "def job(): (folder / str(time.monotonic())).touch(); time.sleep(0.2)\n"
        "Running([job] * 100, 1)\n"
        "while not list(folder.iterdir()): time.sleep(0.01)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=os.environ | {"FOLDER": str(tmp_path)}, check=True, timeout=60)
    time.sleep(1)
    before = len(list(tmp_path.iterdir()))
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) == before < 20
