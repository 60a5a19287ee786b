# SPDX-License-Identifier: MIT
"""A picture of a results file: every contender's time divided by its baseline's, with the spread over the rounds.

python benchmarks/chart.py asynchrony --to asynchrony.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from tilescale.tuning.chart import draw  # noqa: E402 - found through the path above


def command(drawing: Callable[[Mapping[str, Any], Path], None], text: str, always: str = "") -> click.Command:
    """Make the command line of a script that draws results; `text` describes it, `always` is a work that is always
    shown.
    """

    @click.command(help=text.replace("\n    ", "\n\n\b\n    ", 1))
    @click.argument("name")
    @click.option("--to", type=click.Path(path_type=Path), help="The picture.  [default: docs/diagrams/NAME.svg]")
    @click.option("--file", type=click.Path(path_type=Path), help="Results.  [default: benchmarks/results/NAME.json]")
    @click.option("--mode", default="", help="Races of this mode alone: eager, graph or host.  [default: all]")
    def main(name: str, to: Path | None, file: Path | None, mode: str) -> None:
        """Read the results and draw."""
        results = json.loads((file or RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        results["rows"] = [r for r in results["rows"] if mode in ("", r["mode"]) or r["work"] == always]
        drawing(results, to or ROOT / "docs" / "diagrams" / f"{name}.svg")

    return main


if __name__ == "__main__":
    command(draw, __doc__)()
