# SPDX-License-Identifier: MIT
"""Blocks of code know what follows them: a program whose output names its lines has line numbers.

A report is a table that scrolls on a narrow screen; a message has long lines, which wrap.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

LINE_OF_PROGRAM = re.compile(r"program\.py:\d+|\(line \d+\)|line \d+ and line \d+")
WIDEST_TABLE = 110
"""Columns of the widest report; a longer line is a sentence."""


class CodeBlocks(SphinxTransform):
    """Sets `linenos` of programs, and the class `wraps` of messages."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Change the document in place."""
        program: nodes.literal_block | None = None
        for block in self.document.findall(nodes.literal_block):
            language = block.get("language", "")
            if language == "python":
                program = block
            elif language == "text":
                text = block.astext()
                if program is not None and LINE_OF_PROGRAM.search(text):
                    program["linenos"] = True
                if max(map(len, text.splitlines()), default=0) > WIDEST_TABLE:
                    block["classes"].append("wraps")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_transform(CodeBlocks)
    return {"parallel_read_safe": True}
