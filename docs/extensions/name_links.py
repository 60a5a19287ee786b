# SPDX-License-Identifier: MIT
"""Names and pages in backticks, and terms in emphasis, become links to them, so that the pages stay plain Markdown."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"\w+Error|\w+(?:\.\w+)+")
HOMES = ("", "tilescale.", "tilescale.errors.")
PAGE = re.compile(r"docs/([\w/-]+)\.md")


class NameLinks(SphinxPostTransform):
    """Wraps `T.copy(tile, X, dst=peer)` in a link to what documents its first name, `docs/machines.md` to the page.

    A term of the glossary in *emphasis*, singular or plural, leads to its definition.
    """

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Change the document in place."""
        for kind, find in (nodes.literal, self.target), (nodes.emphasis, self.definition):
            for found in list(self.document.findall(kind)):
                is_free = not isinstance(found.parent, nodes.reference | nodes.title)
                if is_free and (target := find(found.astext())):
                    link = make_refnode(self.app.builder, self.env.docname, *target, found.deepcopy())
                    found.replace_self(link)

    def definition(self, text: str) -> tuple[str, str] | None:
        """The page and the place of a term."""
        terms = self.env.domains.standard_domain.objects
        entry = terms.get(("term", text.lower())) or terms.get(("term", text.lower().removesuffix("s")))
        return entry if entry and entry[0] != self.env.docname else None

    def target(self, text: str) -> tuple[str, str] | None:
        """The page, and the place on it, that a text speaks of."""
        if (page := PAGE.fullmatch(text)) and page[1] in self.env.found_docs:
            return page[1], ""
        known, name = self.env.domains["py"].objects, NAME.match(text)
        entries = [known[home + name[0]] for home in HOMES if name and home + name[0] in known]
        return (entries[0].docname, entries[0].node_id) if entries else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(NameLinks)
    return {"parallel_read_safe": True}
