# SPDX-License-Identifier: MIT
"""The form of the last commit, by CONTRIBUTING.md: an area, an imperative subject, and a body that says why."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LONGEST_SUBJECT = 72

TRIVIAL_LINES = 20
"""Changed lines up to which a commit needs no body."""

VERBS = frozenset(
    """
    accept add align allocate allow answer apply ask assert assume avoid batch begin benchmark bind bound branch
    broadcast build bump cache calibrate call canonicalize catch charge check choose clarify clear close collect
    combine compare compile complete compress compute convert copy correct count cover cut declare decrease default
    define delay delete deprecate describe detect distribute document drain draw drop emit emulate enable end enforce
    estimate exclude expect explain expose extend fail fetch fill find fit fold follow forbid format free fuse gather
    generate give group guard handle hide hoist ignore implement import improve increase index infer initialize inline
    insert install interleave interpret invalidate join keep label launch leave let limit link lint list load lower
    make map mark match measure merge move mutate name narrow normalize notify omit open order overlap pack pad
    parallelize parse pass pick pin place poll predict prefer prefetch prepare print profile prove publish put
    quantize quote race raise randomize rank read rebuild record reduce refactor refer refuse register reject release
    rely remove rename reorder repeat replace replay report require reserve reset resolve restore restrict retry
    return reuse revert rewrite rotate round run sample save say scale schedule search select send separate serialize
    set share shorten show shrink signal simplify size skip solve sort specialize split start state stop store stream
    support swap synchronize take test time trace translate treat try tune turn type unify unpack unroll update
    upgrade use validate verify wait warm warn widen wrap write
    """.split()
)

NO_AREA = "begin the subject with an area, as in `ops: keep L2 rasterization for tail rows`"


def faults(message: str, parents: int, changed_lines: int) -> list[str]:
    """Return the changes that a commit needs."""
    subject, _, body = message.strip().partition("\n")
    found = []
    if parents > 1:
        found.append("rebase: no merge commits")
    if len(subject) > LONGEST_SUBJECT:
        found.append(f"shorten the subject: {len(subject)} characters, at most {LONGEST_SUBJECT}")
    if not (match := re.fullmatch(r"[a-z][\w./, -]*: (\S+) .*", subject)):
        found.append(NO_AREA)
    elif match[1] not in VERBS:
        found.append(f"begin with an imperative, not `{match[1]}` (or add it to the verbs of tests/test_commit.py)")
    if not body.strip() and changed_lines > TRIVIAL_LINES:
        found.append(f"say why in the body: {changed_lines} lines changed")
    return found


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def test_the_last_commit_has_the_form():
    try:
        top = git("rev-parse", "--show-toplevel").strip()
        message, parents = git("log", "-1", "--format=%B"), git("log", "-1", "--format=%P").split()
        changes = git("show", "--first-parent", "--numstat", "--format=", "HEAD").split("\n")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or no commits")
    if Path(top).resolve() != ROOT.resolve():
        pytest.skip("not a checkout of this project")
    lines = sum(int(n) for change in changes for n in change.split("\t")[:2] if n.isdigit())
    assert faults(message, len(parents), lines) == []


@pytest.mark.parametrize(
    ("message", "parents", "lines", "expected"),
    [
        ("ops: keep L2 rasterization for tail rows\n\nTail rows lost it.", 1, 500, []),
        ("comm/nodes, tests: add a channel", 1, 20, []),
        ("ops: keep it for tail rows", 1, 21, ["say why in the body: 21 lines changed"]),
        ("ops: keep it for tail rows", 2, 1, ["rebase: no merge commits"]),
        (
            "Keep rasterization",
            1,
            1,
            [NO_AREA],
        ),
        ("d, further", 1, 1, [NO_AREA]),
        ("ops: keep " + "x" * 63, 1, 1, ["shorten the subject: 73 characters, at most 72"]),
    ],
)
def test_faults_of_a_commit(message: str, parents: int, lines: int, expected: list[str]):
    assert faults(message, parents, lines) == expected


@pytest.mark.parametrize("word", ["keeps", "kept", "keeping", "what", "the", "fewer"])
def test_other_words_than_imperatives_are_found(word: str):
    assert [fault.split(",")[0] for fault in faults(f"ops: {word} tail rows", 1, 1)] == ["begin with an imperative"]
