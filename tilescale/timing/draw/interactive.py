# SPDX-License-Identifier: MIT
"""A timeline as one interactive HTML page: zoom, details and causes of each step, units that unfold.

Bokeh draws it, and its script is part of the page: nothing is loaded from elsewhere. A unit that owns tensors is one
row, as full as its engines are busy; unfolded it has a row for each thing that each of its engines does at a time.
`fold.js` arranges the rows, in the reader's browser.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from tilescale.errors import DependencyError
from tilescale.timing.draw.columns import TimelineColumns
from tilescale.timing.draw.files import writing
from tilescale.timing.draw.picture import STYLE
from tilescale.timing.draw.text import heading, summary
from tilescale.timing.timeline import Timeline

ROW_HEIGHT, MOST_HEIGHT, HEAD_WIDTH = 20, 640, 150
"""Pixels: of a row, of a drawing in a notebook, and of the names next to it."""


@dataclass(frozen=True)
class TimelinePage:
    """A timeline as a page. A notebook shows it below its cell.

    Attributes:
        title: what ran where.
        html: the page, complete in itself.
        rows: how many rows it begins with.
    """

    title: str
    html: str
    rows: int

    def save(self, path: str | PathLike[str]) -> None:
        """Write it into a file. Raises UsageError: no file can be made there."""
        with writing(path):
            Path(path).write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Page: timeline of {self.title}; a notebook shows it, save(path) writes it>"

    def _repr_html_(self) -> str:
        height = min(MOST_HEIGHT, 240 + ROW_HEIGHT * self.rows)
        style = f"width:100%;height:{height}px;border:0"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}" title="timeline"></iframe>'


def page(timeline: Timeline, *, unfolded: bool = False) -> TimelinePage:
    """Make the page of a timeline, whose units begin `unfolded` or as one row each. Raises DependencyError: Bokeh is
    missing."""
    try:
        from bokeh.document import Document
        from bokeh.embed import file_html
        from bokeh.models import ColumnDataSource, CustomJS
        from bokeh.resources import INLINE
    except ImportError:
        raise DependencyError(
            "an interactive timeline needs Bokeh", hint="pip install bokeh, or draw a picture: .png, .svg or .pdf"
        ) from None
    columns = TimelineColumns(timeline)
    sources = {name: ColumnDataSource(data) for name, data in columns.sources(unfolded).items()}
    head, main = _names(sources), _drawing(timeline, columns, sources)
    main.y_range = head.y_range
    arrange = CustomJS(args={**sources, "head": head, "main": main, "row_height": ROW_HEIGHT}, code=_text("fold.js"))
    document = Document(title=timeline.title or "timeline")
    document.add_root(_in_columns(head, main))
    for subject in (head, main):
        subject.js_on_event("tap", arrange)
    document.js_on_event("document_ready", arrange)
    html = file_html(document, INLINE, template=_text("page.html"), template_variables=_words(timeline, columns))
    return TimelinePage(timeline.title, html, sum(2 + unfolded * count for count in columns.track_counts))


def _text(name: str) -> str:
    return files("tilescale.timing.draw").joinpath(name).read_text(encoding="utf-8")


def _words(timeline: Timeline, columns: TimelineColumns) -> dict[str, Any]:
    """Texts of the page around the drawing."""
    shown, there = len(columns.numbers), columns.there
    used = {span.kind for span in columns.spans}
    return {
        "heading": heading(timeline, len(columns.units)),
        "level": timeline.level,
        "legend": [STYLE[kind] for kind in STYLE if kind in used],
        "left_out": f"The {shown} longest of {there} steps are drawn." if shown < there else "",
        "summary": summary(timeline),
    }


def _in_columns(head: Any, main: Any) -> Any:
    from bokeh.models import Row

    return Row(head, main, sizing_mode="stretch_width")


def _plain(figure: Any) -> Any:
    """A figure without what Bokeh draws around it; the page's own colours show through."""
    figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None
    figure.ygrid.visible = figure.yaxis.visible = False
    figure.toolbar.logo = None
    return figure


def _names(sources: dict[str, Any]) -> Any:
    from bokeh.models import Range1d
    from bokeh.plotting import figure

    ranges: dict[str, Any] = dict(x_range=Range1d(start=0, end=1), y_range=Range1d(start=1, end=0))
    wheel: dict[str, Any] = dict(tools="ywheel_pan", active_scroll="ywheel_pan", toolbar_location=None)
    names = _plain(figure(width=HEAD_WIDTH, min_border=0, **wheel, **ranges))
    names.xgrid.visible = False
    names.xaxis.axis_line_color = names.xaxis.major_tick_line_color = names.xaxis.major_label_text_color = None
    names.xaxis.minor_tick_line_color = None
    names.text(
        x=0.02, y="y", text="text", text_font_size="12px", text_baseline="middle", text_color="#808080",
        source=sources["labels"], name="names",
    )  # fmt: skip
    return names


def _drawing(timeline: Timeline, columns: TimelineColumns, sources: dict[str, Any]) -> Any:
    """Spans, shares and the critical path over time."""
    from bokeh.models import CustomJSHover, HoverTool, PanTool, Range1d, ResetTool, WheelZoomTool
    from bokeh.plotting import figure

    end = timeline.end_s * 1e6 or 1.0
    main = _plain(
        figure(
            tools=[PanTool(), ResetTool()],
            x_range=Range1d(start=0, end=end, bounds=(-0.02 * end, 1.02 * end)),
            x_axis_label="simulated time in us",
            sizing_mode="stretch_width",
            min_border=0,
            toolbar_location="above",
        )  # fmt: skip
    )
    zoom = WheelZoomTool(dimensions="width")
    main.add_tools(zoom, "xbox_zoom", "save")
    main.toolbar.active_scroll = zoom
    boxes = dict(left="left", right="right", top="top", bottom="bottom", fill_color="colour")
    edges = dict(line_color="#ffffff", line_alpha=0.5, line_width=0.5)
    share = main.quad(**boxes, line_color=None, source=sources["shares"])
    span = main.quad(**boxes, **edges, source=sources["spans"])
    main.line("x", "y", source=sources["path"], line_width=2, line_color="#808080", name="path")
    words = CustomJSHover(args={"spans": sources["spans"], "tips": columns.tips}, code=_text("tip.js"))
    steps = CustomJSHover(args={"tips": columns.share_tips}, code="return tips[value]")
    box = "<div style='white-space:pre-line'>{}</div>"
    for quads, text, tip in (
        (span, "@tip{custom}", words),
        (share, "@kind: @share{0 %}, from @left{0.[000]} to @right{0.[000]} us\n@tip{custom}", steps),
    ):
        formatters: dict[str, Any] = {"@tip": tip}
        hover = HoverTool(
            renderers=[quads], tooltips=box.format(text), formatters=formatters, point_policy="follow_mouse"
        )
        main.add_tools(hover)
    return main
