# SPDX-License-Identifier: MIT
"""Outcomes of checks, in the form of all results files: the machine, the versions, and a row for each."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilescale.tuning.race import record
from tilescale.tuning.versions import machine, versions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        part: the job that it was a part of.
        nodes, ranks: of that job.
        passed: ranks that it passed on.
        failures: what others raised, a text each; of a job that ended otherwise, how.
    """

    part: str
    check: str
    nodes: int
    ranks: int
    passed: int
    seconds: float
    failures: tuple[str, ...] = ()

    @staticmethod
    def of(part: str, check: str, nodes: int, verdicts: Sequence[str], seconds: float) -> "Outcome":
        """Outcome from each rank's text: "PASS" and anything, or the reason."""
        failures = tuple(verdict for verdict in verdicts if not verdict.startswith("PASS"))
        return Outcome(part, check, nodes, len(verdicts), len(verdicts) - len(failures), round(seconds, 1), failures)


def keep(outcome: Outcome, path: Path) -> None:
    """Add it to a file of lines, as soon as it exists: a job may be killed at any time."""
    with path.open("a", encoding="utf-8") as lines:
        print(json.dumps(asdict(outcome)), file=lines)


def kept(path: Path) -> list[Outcome]:
    """Records that `keep` has written there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Into a results file, in the place of former rows of the same parts."""
    rows = [asdict(outcome) for outcome in outcomes]
    record(path, rows, machine(), versions(), same=lambda a, b: a["part"] == b["part"])
