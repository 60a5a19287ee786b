# SPDX-License-Identifier: MIT
"""Drawings of `docs/figures` become part of the page, so that their colours follow the theme that the reader chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform


class InlineFigures(SphinxPostTransform):
    """Replaces the image of a file that begins with `<svg ... class="figure"` by its text."""

    default_priority = 5
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Change the document in place."""
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.env.srcdir, image["uri"])
            if path.suffix == ".svg" and 'class="figure"' in (text := path.read_text(encoding="utf-8"))[:200]:
                image.replace_self(nodes.raw("", text, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(InlineFigures)
    return {"parallel_read_safe": True}
