# SPDX-License-Identifier: MIT
"""Text with columns as HTML, for notebooks."""

from html import escape


def preformatted(text: str) -> str:
    """A `pre` element that names its font: the pages of nbconvert have none for it."""
    return f"<pre style='font-family:monospace'>{escape(text)}</pre>"
