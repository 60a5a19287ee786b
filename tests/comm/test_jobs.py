# SPDX-License-Identifier: MIT
"""Real jobs under every launcher: what works, and that no failure hangs.

A wait that does not notice a failure lasts for the job's timeout, 600 s, and a rank that goes on sleeps for 300 s;
`run_words` ends both long before, and fails. How soon failures are noticed is in docs/faults.md.
"""

from __future__ import annotations

import re

import pytest

LAUNCHERS = ["tilescale run", "torchrun", "MPI"]


# Ranks of torchrun and MPI: those that the scripts of launch/ start (test_launch_scripts.py).
@pytest.mark.parametrize(("launcher", "ranks"), [("tilescale run", 1), ("tilescale run", 3), ("MPI", 1)])
def test_collectives(run_job, launcher: str, ranks: int) -> None:
    name = "alone" if (launcher, ranks) == ("MPI", 1) else launcher  # one MPI process needs no mpi4py
    done = run_job(launcher, ranks, "collectives.py", name, str(ranks))
    assert done.code == 0, done.output
    assert sorted(re.findall(r"rank (\d) is content", done.output)) == [str(r) for r in range(ranks)]


RAISES = "raise", 1, r"rank 1 \(pid \d+ on \S+\) failed: ValueError: deliberate.*at \S+failures.py:\d+"
EXITS = "exit", 0, r"rank 0 \(pid \d+ on \S+\) ended before it came to barrier\(\)"
KILLED = "kill", 1, r"rank 1 \(pid \d+ on \S+\) disappeared"


# Launchers differ in their reaction to a rank that ends only where the rank is killed.
@pytest.mark.parametrize(
    ("launcher", "what", "culprit", "text"),
    [("tilescale run", *RAISES), ("tilescale run", *EXITS), *((launcher, *KILLED) for launcher in LAUNCHERS)],
)
def test_others_learn_of_a_failure(run_job, launcher: str, what: str, culprit: int, text: str) -> None:
    done = run_job(launcher, 2, "failures.py", what, str(culprit))
    assert done.code != 0
    if what == "kill":  # mpirun and torchrun may end the other rank before it has reported; then they name the culprit
        text += {"MPI": r"|Killed|signal 9", "torchrun": r"|local_rank: 1\)\s+exitcode +: -9"}.get(launcher, "")
    assert re.search(rf"RankFailedError: {text}|{text if launcher == 'MPI' else '$^'}", done.output), done.output


@pytest.mark.parametrize("when", ["kill", "kill in init"])
def test_death_of_rank_0_takes_its_store_along(run_job, when: str) -> None:
    done = run_job("tilescale run", 3, "failures.py", when, "0")
    assert done.code == 128 + 9, "the others let it go first"
    assert "called from" not in done.output, "what follows from it is a line each"
    assert len(re.findall(r"RankFailedError: rank 0 \(pid \d+ on \S+\) disappeared", done.output)) == 2, done.output
    assert "c10d" not in done.output  # torch's own pages of C++ frames


def test_a_rank_has_a_name_before_it_comes_to_the_first_call(run_job) -> None:
    done = run_job("tilescale run", 2, "failures.py", "kill in init", "1")
    assert re.search(rf"RankFailedError: {KILLED[2]}.*rank 0 waits in init\(\)", done.output), done.output


def test_busy_ranks_are_ended(run_job) -> None:
    done = run_job("MPI", 2, "failures.py", "raise while others work", "0")
    assert done.code != 0 and "ValueError: deliberate" in done.output


def test_different_collectives(run_job) -> None:
    done = run_job("torchrun", 2, "failures.py", "mismatch", "1")
    assert done.code != 0
    text = r"RankMismatchError: .*rank 0 calls barrier\(\), rank 1 calls gather\(root=0\)"
    assert len(re.findall(text, done.output)) == 2, done.output
    assert len(set(re.findall(r"failures.py:(\d+) \(rank [01]: ", done.output))) == 2, done.output


def test_a_rank_that_never_comes(run_job) -> None:
    done = run_job("tilescale run", 2, "failures.py", "late", "1", TILESCALE_TIMEOUT_S="5")  # also of init()
    assert done.code == 1
    assert re.search(r"no sign of rank 1 .* in barrier\(\) for 5 s", done.output), done.output
    assert "rank 1 was last seen in init()" in done.output
