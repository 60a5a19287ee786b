# SPDX-License-Identifier: MIT
"""Steps of a long benchmark with a time limit: one that takes too long ends its process, and the next run skips it.

A host that waits for a device, or for a rank that will never arrive, cannot be interrupted, only ended. So before each
step a file records its contender, and Python's fault handler is set to end the process with all stacks. A resumed run
reads the contender from that file and leaves it out.
"""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Steps:
    """The steps of this run, on one rank.

    Attributes:
        path: file of the step in progress; None on ranks that do not write it.
        limit_s: time limit of a step.
        say: shows a line for each step; for equal lines in a row, the first.
        lost: title of a work -> contenders in which earlier runs ended, and their steps.
    """

    path: Path | None
    limit_s: float
    say: Callable[[str], None]
    lost: dict[str, dict[str, str]] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
    _last: dict[str, str] = field(default_factory=dict)

    def resume(self) -> None:
        """Read the records of earlier runs."""
        if self.path is not None and self.path.exists():
            noted = json.loads(self.path.read_text(encoding="utf-8"))
            self.lost = noted["lost"]
            if noted["doing"]:
                title, contender, what = noted["doing"]
                self.lost.setdefault(title, {})[contender] = f"the run ended in this step: {what}"

    def start(self, title: str, contender: str, what: str) -> None:
        """Begin a step of a contender, and end the previous one."""
        faulthandler.dump_traceback_later(self.limit_s, exit=True)
        self._note([title, contender, what])
        if self._last.get(title + contender) != what:
            self._last[title + contender] = what
            self.say(f"[{time.monotonic() - self.begin:6.1f} s] {title}: {contender}: {what}")

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._note(None)

    def _note(self, doing: list[str] | None) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"doing": doing, "lost": self.lost}, indent=1), encoding="utf-8")
