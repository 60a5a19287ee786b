# SPDX-License-Identifier: MIT
"""Views of timelines: text, pictures, interactive pages, and traces for Perfetto."""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path

from tilescale.errors import UsageError
from tilescale.timing.draw.interactive import TimelinePage, page
from tilescale.timing.draw.picture import FORMATS, picture
from tilescale.timing.draw.text import summary
from tilescale.timing.draw.trace import trace
from tilescale.timing.timeline import Timeline

__all__ = ["TimelinePage", "compare", "page", "plot", "summary", "trace"]


def plot(timeline: Timeline, path: str | PathLike[str], *, engines: bool = False, dark: bool = False) -> None:
    """Draw a timeline; arguments and errors as for `tilescale.Report.plot`."""
    target = Path(fspath(path))
    if target.suffix == ".html":
        page(timeline, unfolded=engines).save(target)
    elif target.suffix in FORMATS:
        picture({"": timeline}, target, engines=engines, dark=dark)
    else:
        known = ", ".join((".html", *FORMATS))
        raise UsageError(f"a timeline cannot be drawn into {target.name!r}", hint=f"end it in {known}")


def compare(timelines: Mapping[str, Timeline], path: str | PathLike[str], *, dark: bool = False) -> None:
    """Draw several timelines by their names into one picture, one below the other on one axis of time.

    Raises as `tilescale.Report.plot`, which says what `dark` is; a page (.html) holds one timeline only.
    """
    target = Path(fspath(path))
    if target.suffix not in FORMATS:
        raise UsageError(
            f"several timelines cannot be drawn into {target.name!r}", hint=f"end it in {', '.join(FORMATS)}"
        )
    picture(timelines, target, engines=False, dark=dark)
